"""``medclip-dcl report RUN``."""

from medclip_dcl.report.report import main

if __name__ == "__main__":
    main()
