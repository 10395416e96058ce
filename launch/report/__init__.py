"""What a run tells.

while it runs  view, status
afterwards     summary, plot, explain (a standstill), diff, over steps, records, timeline and intervals
"""
