"""The data bus of a run: every sample from admission to commit, once.

for roles      bus, member; ahead, a round asked for early; config, its settings
decisions      index (a pure fold) with group, rounds (and balance), space, versions; evaluations, read off it
coordinator    coordinator: leasing, consuming and publishing, over transitions, rings, puts (records as events), wakes and
               journal (pending: what is not in it yet); serve, its process
beside it      unfinished: files of what replicas have sampled of episodes that are not whole
afterwards     audit: what became of every sample
"""
