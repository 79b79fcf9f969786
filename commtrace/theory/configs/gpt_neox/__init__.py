"""Reading and validation of GPT-NeoX's YAML files.

yaml_files, field_types, setting_checks     settings as in files, their types, and values that several keys determine
config, derived_settings    the checked configuration, and what GPT-NeoX derives from it
program_config, program_modules             those of GPT-NeoX's own program
planning                    the files as a planned job
"""
