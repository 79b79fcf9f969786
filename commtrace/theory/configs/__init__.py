"""Configuration files as job descriptions: GPT-NeoX, DeepSpeed, Hugging Face.

job_plan, plan_options      which files describe a job; the options that complete them
gpt_neox/                   reader of its files
hugging_face                reader of config.json, and the modules and parameters of its models
versions_in_use             of the libraries that will run them
rank_layout                 ranks by parallel dimension, batch sizes, element types
deepspeed_job_row, torch_job_rows, pipeline_job_rows    the rows of the table `job`
"""
