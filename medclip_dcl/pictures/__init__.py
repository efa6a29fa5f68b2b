"""Radiographs as files and arrays: decoding, grey levels, geometry and transforms."""
