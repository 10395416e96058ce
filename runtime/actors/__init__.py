"""Calls between processes of a run.

actor          what answers: endpoints, one after the other or side by side
ref            who asks: a reference to one actor or a group of them; broadcast sends one payload to many
transport      the frames between them
"""
