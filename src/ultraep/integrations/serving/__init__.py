"""What the plug-ins for vLLM and SGLang share. Nothing here imports either.

settings    settings from the environment or from the engine's configuration
tensors     how the tensors of an expert travel, for every quantisation method
counters    counters on the engine's metrics page
service     balancers and counters that the layers of a model share
experts     home experts plus replicas, for the classes of an engine
"""
