"""From a user's files to prompts.

rows           files, lines and sources (how they are read), opening (where they are from), datasets (what is made of them),
               cursor (which is next), fingerprints (the same?), unusable (how many may be)
prompts        a row as a prompt (messages), with its media: media_rows and media
"""
