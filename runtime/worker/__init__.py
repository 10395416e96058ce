"""The process of one rank of a role group.

worker         starts the roles of one process and ends them
context        what a role is given; membership, how it belongs to the run
service        the process of what the supervisor starts beside the role groups
"""
