"""`python -m strata` is the `strata` command, also where no script was installed."""

from strata.interfaces.cli import main

main()
