"""Configuration files as job descriptions: GPT-NeoX, DeepSpeed, Hugging Face.

job_plan, plan_options      which files describe a job; the options that complete them
gpt_neox/, hugging_face     readers of files
versions_in_use             of the libraries that will run them
rank_layout                 ranks by parallel dimension, batch sizes, element types
deepspeed_job_row, torch_job_rows, pipeline_job_rows    the rows of the table `job`
"""
