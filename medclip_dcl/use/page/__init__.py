"""A page in the browser on which a trained model draws heat maps of typed sentences over an image.

``medclip-dcl page runs/demo`` (needs the extra ``page``)
"""
