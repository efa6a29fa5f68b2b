"""Published image-text models as exported folders: ``python -m medclip_dcl.convert SOURCE --output FOLDER``."""
