"""Process groups across separately started jobs.

groups         named, numbered by epoch, with deadlines; over communicators and carriers (gloo, NCCL, nccl_extras)
meeting        where members ask for the next epoch; epochs, the agreement
"""
