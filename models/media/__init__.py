"""Image, audio and video on their way to the model: config, inputs, refs, decode, video, processor, batch, towers."""
