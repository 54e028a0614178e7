def resample(*_args, **_kwargs):
    raise NotImplementedError("torchaudio is not installed, only a stand-in for imports")
