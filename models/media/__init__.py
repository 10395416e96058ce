"""Image, audio and video on their way to the model.

from rows to arrays    refs, config (limits), fetch, decode, frames, library, positions, processor; inputs is what comes out
into a forward         batch (each prompt's media once through its tower)
errors                 what is wrong with a medium
"""
