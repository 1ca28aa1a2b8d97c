"""Running as a service: the unit, its installation, and what the process tells systemd."""
