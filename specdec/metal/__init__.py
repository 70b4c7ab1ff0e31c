"""Metal kernels, each with its proof; imports of specdec only ``cuda`` and ``utils``.

Nobody has run them on a Mac. Each is off until ``specdec probe`` has proven and timed
it on the machine at hand.
"""
