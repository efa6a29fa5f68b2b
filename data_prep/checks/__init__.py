"""Checks of a prepared set: `tables` against each other and dataset.json, and `images`.

A check returns its problems: lines that name the defect, its number of cases, and the first of them.
"""
