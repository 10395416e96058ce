"""SGLang imports every module of this package, and takes the processors of media that they define."""
