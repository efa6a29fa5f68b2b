"""Earlier name of ``python -m medclip_dcl.report.compare``."""

from medclip_dcl.report.compare import main

if __name__ == "__main__":
    main()
