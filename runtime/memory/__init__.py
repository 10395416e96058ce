"""Memory that processes of a node share.

segments       who made one, who may open it, when it goes
free           how much of the machine's memory is free
"""
