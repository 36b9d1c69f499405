"""The errors Coterie raises on purpose: one sentence each, naming what is wrong, where, and what would be right."""


class CoterieError(ValueError):
    """Anything a user can mend; the command line prints it as one line and exits with 2."""


class DataError(CoterieError):
    """A client's data, a data set or a partition is not what it must be."""


class ModelError(CoterieError):
    """A model, a row of parameters or an output does not fit."""


class AskError(CoterieError):
    """A question to the fleet makes no sense."""


class SettingError(CoterieError):
    """A name, a hyper-parameter or an experiment file is wrong."""


class RecordError(CoterieError):
    """A run's folder cannot be written, read or resumed."""


class DeviceError(CoterieError):
    """The device that was asked for is not there, or too small."""
