"""Who starts what, notices its death, and starts it again.

decisions      machine (pure: events in, orders out), over spec (what it is given) and orders; standstill (nothing moves)
shell          supervisor, over launcher, nursery (forks what is started), root (above one life of a group), proxy (in place
               of a rank), incarnation (those processes), store, heartbeat, announcer (tells the coordinator)
what is owned  estate: directory, token, memory, socket
"""
