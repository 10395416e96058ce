"""Scores, by the user's own functions and by a judge.

pool           who asks; function, where they run: in killable processes, or here; worker, what such a process does; scores,
               what a function's result must look like; several, of more than one function; hub/, those that have a name
genrm          the judge: who is asked, and again; verdicts, what is asked and what the answer says
"""
