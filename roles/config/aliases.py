"""Names under which TRL, verl, slime, prime-rl and earlier versions know what a setting of a run sets.

Owns the table that error texts about unknown settings suggest from; `runtime/section.py` looks names up in it. No name of it is
accepted as a setting.
"""

from __future__ import annotations

from collections.abc import Mapping

_MEANT = {
    "role_groups": "groups colocate n_gpus_per_node num_gpus actor_num_gpus_per_node rollout_num_gpus",
    "model.path": "model_name_or_path model_name hf_checkpoint pretrained_model_name_or_path",
    "model.dtype": "torch_dtype",
    "model.attn": "attn_implementation",
    "data.path": "train_files train_dataset dataset dataset_name prompt_data",
    "data.prompt": "prompt_key input_key question",
    "data.label": "label_key answer",
    "data.metadata": "metadata_key",
    "data.tools": "tool_key",
    "data.shuffle": "rollout_shuffle shuffle_groups",
    "data.limit": "max_samples",
    "data.too_long": "filter_overlong_prompts",
    "data.num_passes sft.epochs dpo.epochs reward_model.epochs": "num_train_epochs total_epochs num_epoch",
    "num_steps": "max_steps num_rollout total_training_steps",
    "run_dir": "output_dir default_local_dir",
    "name": "experiment_name run_name",
    "train.save_every": "save_steps save_freq save_interval",
    "train.keep_checkpoints": "save_total_limit keep_last max_actor_ckpt_to_keep",
    "train.best.metric": "metric_for_best_model",
    "evaluation.every": "eval_steps test_freq eval_interval",
    "evaluation.num_slots": "per_device_eval_batch_size",
    "trackers": "report_to logger",
    "rollout.samples_per_prompt": "num_generations n group_size rollouts_per_example n_samples_per_prompt",
    "rollout.prompts_per_step": "train_batch_size rollout_batch_size generation_batch_size batch_size",
    "rollout.max_new_tokens": "max_completion_length max_response_length rollout_max_response_len max_tokens",
    "rollout.max_prompt_tokens": "max_prompt_length rollout_max_prompt_len",
    "rollout.max_prompt_tokens rollout.max_new_tokens": "max_model_len max_seq_len seq_len",
    "rollout.temperature": "rollout_temperature",
    "rollout.sglang": "use_vllm",
    "rollout.sglang.tensor_parallel": "tensor_model_parallel_size tp",
    "rollout.filter": "dynamic_sampling dynamic_sampling_filter_path filter_groups",
    "rollout.mask_truncated": "mask_truncated_completions",
    "max_staleness": "max_async_level max_off_policy_steps staleness_threshold",
    "reward.function": "reward_funcs reward_fn custom_reward_function custom_rm_path rm_type",
    "reward.components": "reward_weights",
    "reward.overlong_tokens": "overlong_buffer overlong_buffer_len",
    "scorer.model.path": "reward_model_path",
    "algorithm.name": "adv_estimator advantage_estimator importance_sampling_level",
    "algorithm.loss_aggregation": "normalizer loss_agg_mode calculate_per_token_loss",
    "algorithm.name algorithm.loss_aggregation": "loss_type",
    "algorithm.normalize_std": "scale_rewards norm_adv_by_std_in_grpo",
    "algorithm.kl_coef": "beta init_kl_coef kl_loss_coef use_kl_loss",
    "algorithm.kl": "kl_loss_type kl_penalty",
    "algorithm.kl_in": "use_kl_in_reward",
    "algorithm.clip_low": "epsilon cliprange clip_ratio eps_clip clip_ratio_low",
    "algorithm.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
    "algorithm.dual_clip": "clip_ratio_c delta eps_clip_c",
    "algorithm.gae_lambda": "lam lambd",
    "algorithm.entropy_coef": "entropy_coeff",
    "algorithm.tis_high": "tis_imp_ratio_cap vllm_importance_sampling_cap rollout_is_threshold",
    "critic.value_clip": "cliprange_value",
    "reference.refresh_every": "ref_model_sync_steps ref_update_interval",
    "train.lr": "learning_rate",
    "train.schedule": "lr_scheduler_type lr_scheduler lr_decay_style",
    "train.warmup_steps": "lr_warmup_steps lr_warmup_iters warmup_ratio lr_warmup_steps_ratio",
    "train.min_lr_fraction": "min_lr_ratio",
    "train.betas": "adam_beta1 adam_beta2",
    "train.eps": "adam_epsilon",
    "train.clip_grad_norm": "max_grad_norm max_norm grad_clip clip_grad",
    "train.passes": "num_iterations ppo_epochs num_ppo_epochs",
    "train.passes data.num_passes": "epochs",
    "train.num_mini_batches": "optimizer_steps_per_batch num_steps_per_rollout steps_per_generation ppo_mini_batch_size "
    "mini_batch_size global_batch_size",
    "rollout.prompts_per_step train.micro_batch_tokens": "gradient_accumulation_steps per_device_train_batch_size",
    "train.micro_batch_tokens": "micro_batch_size ppo_micro_batch_size "
    "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu max_tokens_per_gpu",
    "train.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing recompute_granularity",
    "train.offload_optimizer": "optimizer_offload optimizer_cpu_offload",
    "train.compile": "torch_compile use_torch_compile",
    "train.dtype": "bf16 fp16",
    "train.lora": "peft_config",
    "train.lora.rank": "lora_rank r",
    "train.lora.alpha": "lora_alpha",
    "train.lora.dropout": "lora_dropout",
    "train.lora.targets": "target_modules",
    "train.router_replay": "use_rollout_routing_replay",
}
ALIASES: Mapping[str, tuple[str, ...]] = {
    name: tuple(k.split()) for k, names in _MEANT.items() for name in names.split()
} | {"logging_steps": ()}
"""Name elsewhere -> paths of the settings that it may mean; none where every step is written."""
REMARKS: Mapping[str, str] = {
    "role_groups": "For example fully_async(rollout_devices=1, actor_processes=7, actor_devices=1), or colocate()",
    "rollout.prompts_per_step": "It counts prompts, each of which gives rollout.samples_per_prompt samples",
    "train.passes": "They are over the prompt groups of a step; data.num_passes are over the data",
    "train.num_mini_batches": "It is the number of mini-batches of a step, not their size",
    "algorithm.name": "It is a recipe, such as 'grpo', 'dapo' or 'dr_grpo'",
    "train.micro_batch_tokens": "It is the size of a micro-batch, in tokens; a step's is rollout.prompts_per_step",
    "data.shuffle": "It shuffles rows one by one, of parquet too",
    "train.warmup_steps": "It is a number of steps",
}
"""Path of a setting -> what to add where it is suggested, since it differs from what has the other name."""
