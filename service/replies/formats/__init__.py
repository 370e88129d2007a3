"""The formats, one in each module: the module is named as the format, and has it as FORMAT."""
