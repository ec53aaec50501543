"""The names that TRL, SkyRL, miles, vime and verl have for keys of the spec, as in docs/migrate-from.md."""

_CALLED = {
    "model.path": "model model_name_or_path hf_checkpoint model_name pretrained",
    "model.dtype": "torch_dtype bf16 fp16",
    "model.quantize": "load_in_4bit load_in_8bit",
    "trainer.backend": "strategy train_backend actor.strategy",
    "rollout.backend": "use_vllm inference_backend rollout.name",
    "lora.rank": "r lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.target_modules": "lora_target_modules",
    "lora.exclude_modules": "modules_to_exclude",
    "lora.init": "init_lora_weights init_method",
    "lora.rslora": "use_rslora",
    "lora.dora": "use_dora",
    "lora.type": "lora_type",
    "lora.adapter_path": "lora_adapter_path adapter_name_or_path",
    "trainer.tp": "tensor_model_parallel_size",
    "trainer.pp": "pipeline_model_parallel_size",
    "trainer.ep": "expert_model_parallel_size",
    "trainer.cp": "context_parallel_size ulysses_sequence_parallel_size",
    "rollout.tp": (
        "rollout_num_gpus_per_engine tensor_parallel_size vllm_tensor_parallel_size "
        "rollout.tensor_model_parallel_size"
    ),
    "rollout.servers": "num_engines",
    "trainer.lr": "learning_rate",
    "trainer.betas": "adam_betas adam_beta1 adam_beta2",
    "trainer.max_grad_norm": "clip_grad grad_clip",
    "trainer.warmup_steps": "lr_warmup_steps lr_warmup_steps_ratio warmup_ratio",
    "trainer.schedule": "warmup_style lr_scheduler_type lr_decay_style",
    "trainer.steps": (
        "max_steps num_rollout max_training_steps epochs num_train_epochs total_epochs total_training_steps"
    ),
    "trainer.tokens_per_microbatch": (
        "max_tokens_per_microbatch max_tokens_per_gpu per_device_train_batch_size "
        "gradient_accumulation_steps ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu use_dynamic_bsz"
    ),
    "trainer.activation_checkpointing": (
        "gradient_checkpointing recompute_granularity enable_gradient_checkpointing"
    ),
    "data.prompts_per_step": "batch_size train_batch_size rollout_batch_size generation_batch_size",
    "algorithm.group_size": "num_generations n_samples_per_prompt group_size n",
    "algorithm.minibatches": "policy_mini_batch_size ppo_mini_batch_size num_steps_per_rollout",
    "algorithm.epochs": "update_epochs_per_batch num_iterations ppo_epochs",
    "algorithm.name": "adv_estimator advantage_estimator loss_mode",
    "algorithm.clip": (
        "eps_clip eps_clip_low eps_clip_high epsilon epsilon_high clip_ratio clip_ratio_low clip_ratio_high "
        "cliprange"
    ),
    "algorithm.dual": "clip_ratio_c",
    "algorithm.kl.coef": "beta kl_coef kl_loss_coef use_kl_loss",
    "algorithm.kl.where": "use_kl_in_reward",
    "algorithm.kl.target": "target_kl kl_ctrl.type",
    "algorithm.entropy_coef": "entropy_coeff",
    "algorithm.kl.type": "kl_loss_type kl_estimator_type kl_penalty",
    "algorithm.scale": (
        "grpo_norm_by_std disable_grpo_std_normalization scale_rewards norm_adv_by_std_in_grpo"
    ),
    "algorithm.level": "loss_reduction calculate_per_token_loss loss_type loss_agg_mode",
    "algorithm.dynamic_sampling.max_batches": "filter_groups filter_groups.enable max_num_gen_batches",
    "algorithm.critic.warmup_steps": "critic_warmup",
    "algorithm.importance_cap": (
        "token_tis_ratio_clip_high use_tis tis_clip vllm_importance_sampling_clip_max "
        "tis_imp_ratio_cap rollout_is_threshold"
    ),
    "rollout.temperature": "rollout_temperature",
    "rollout.top_p": "rollout_top_p",
    "rollout.top_k": "rollout_top_k",
    "rollout.stop": "rollout_stop",
    "rollout.max_new_tokens": (
        "max_completion_length max_generate_length rollout_max_response_len max_response_length max_tokens "
        "response_length"
    ),
    "rollout.engine_args": (
        "max_model_len max_num_seqs max_num_batched_tokens enforce_eager free_cache_engine"
    ),
    "data.max_prompt_tokens": "max_prompt_length rollout_max_prompt_len prompt_length",
    "data.max_sample_tokens": "max_length max_seq_length",
    "data.too_long": "filter_overlong_prompts truncation",
    "data.chat_template_kwargs": "apply_chat_template_kwargs",
    "data.train": "dataset_name dataset train_data train_files prompt_data",
    "data.eval": "eval_dataset eval_data val_data val_files",
    "data.prompt_key": "input_key",
    "data.answer_key": "label_key",
    "reward": (
        "env_class rm_type reward_funcs reward_function reward_fn custom_reward_function "
        "custom_reward_function.path custom_reward_function.name reward_manager"
    ),
    "env.turns": "max_turns max_assistant_turns",
    "pool.mode": "colocate_all colocate vllm_mode vllm_enable_sleep_mode hybrid_engine",
    "pool.memory_fraction": (
        "gpu_memory_utilization vllm_gpu_memory_utilization sglang_mem_fraction_static mem_fraction_static"
    ),
    "eval.every": "eval_interval eval_steps test_freq",
    "eval.sets": "val_kwargs.n val_kwargs.temperature val_kwargs.top_p",
    "checkpoint.every": "ckpt_interval save_interval save_steps save_freq",
    "checkpoint.keep": "max_ckpts_to_keep save_total_limit max_actor_ckpt_to_keep",
    "loggers": "report_to logger",
    "name": "experiment_name run_name",
    "resources.devices": "n_gpus_per_node",
    "resources.rollout_devices": "rollout_num_gpus num_infer_gpus num_inference_engines",
    "resources.nodes": "nnodes",
}
SYNONYMS = {word: key for key, words in _CALLED.items() for word in words.split()}
"""The key of the spec by what others call it."""


def called_elsewhere(name: str) -> str:
    """Return the key of the spec that others call so, dotted; "" for none.

    name: a key, perhaps dotted, or a flag: `lora.r`, `--learning-rate`. Its last two words say more than the
        last.
    """
    words = name.lstrip("-").replace("-", "_").lower().split(".")
    return SYNONYMS.get(".".join(words[-2:])) or SYNONYMS.get(words[-1], "")
