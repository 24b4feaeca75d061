"""Faults that are planted in the sources one at a time, and which test catches each: ``python -m faults --suite test``.

``areas/*.yaml`` list them. Each is a mistake that somebody could make, with what goes wrong for a user.
"""
