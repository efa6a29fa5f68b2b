"""``python -m medclip_dcl``: fit, validate, test, predict."""

from medclip_dcl.command.cli import main

if __name__ == "__main__":
    main()
