"""What samples tokens.

engine         the protocol; stops, ranges and faults, which all engines share
embedded/      in this process      sglang/   servers      dispatch/   several engines behind one
replica        the engines of one rollout process and the weights that they get
"""
