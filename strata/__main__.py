"""The `strata` script, and `python -m strata` where no script was installed."""

import signal


def main() -> None:
    """Run the command line.

    Until it is loaded, Ctrl-C simply ends the process: as an exception it would come out of whatever is being
    imported at that moment, with a traceback.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else the caller wants it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from strata.interfaces.cli import main as command

    signal.signal(signal.SIGINT, handler)
    command()


if __name__ == "__main__":
    main()
