"""Models beside each other: ``python -m medclip_dcl.benchmark MODEL... --sets SET... --output FOLDER``."""
