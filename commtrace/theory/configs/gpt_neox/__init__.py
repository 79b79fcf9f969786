"""Reading and validation of GPT-NeoX's YAML files.

yaml_files, field_types, setting_checks     settings as in files, their types, and values that several keys determine
config, engine_settings     the checked configuration, and what engines and models get from it
program_config, program_modules             those of GPT-NeoX's own program
planning                    the files as a planned job
"""
