"""From a user's files to prompts.

rows           sources (where they are from), datasets (what is made of them), cursor (which is next), fingerprints (the same?)
prompts        a row as a prompt (messages), with its media: media_rows and media
"""
