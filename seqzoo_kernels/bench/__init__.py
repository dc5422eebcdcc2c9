"""``python -m seqzoo_kernels.bench``: our ops and their peers on the same tensors, in one run.

core.py     a case, its ways to be run, and the row they give
timing.py   device time, peak memory, cold start
output.py   table, JSON, plot
cpu.py      what runs when no op is named: a few shapes of every op, by the clock
<op>.py     the shapes of an op, ours, its peers, and the numbers to reach
"""
