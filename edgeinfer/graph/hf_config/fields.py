"""Config fields that may be ignored, and fields that may be ignored only with a value that switches them off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QUANTISED = ("quantization_config", "compression_config", "quantization")
"""Keys by which a config declares quantised weights; MLX writes two of them."""


def is_quantised(fields: Mapping[str, Any]) -> bool:
    """Return whether a config says that the weights of its checkpoint are quantised."""
    return any(fields.get(key) for key in QUANTISED)


HARMLESS = frozenset(
    # Provenance and bookkeeping.
    """_name_or_path name_or_path _commit_hash model_type architectures transformers_version dtype torch_dtype
    unsloth_fixed unsloth_version is_llama_config transformers.js_config
    _attn_implementation attn_implementation _attn_implementation_autoset _flash_attn_2_enabled
    """.split()
    # Training only.
    + """router_aux_loss_coef router_jitter_noise router_z_loss_coef output_router_logits
    """.split()
    + """attention_dropout hidden_dropout embd_pdrop resid_pdrop initializer_range neftune_noise_alpha attn_pdrop
    resid_dropout embed_dropout classifier_dropout layerdrop init_std dropout activation_dropout embedding_dropout
    residual_dropout gradient_checkpointing
    """.split()
    # How results are returned, and heads for other tasks.
    + """use_cache return_dict output_hidden_states output_attentions torchscript id2label label2id num_labels
    problem_type finetuning_task task_specific_params tokenizer_class prefix tie_encoder_decoder
    keys_to_ignore_at_inference chunk_size_feed_forward summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj output_past
    """.split()
    # Splits matrices into slices whose sum is the same product.
    + ["pretraining_tp"]
    # Tokens with a role in padding or other tasks.
    + "pad_token_id sep_token_id decoder_start_token_id unk_token_id".split()
    # Generation defaults that old configs carry.
    + """bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length max_new_tokens min_length min_p no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens temperature top_k top_p typical_p
    """.split()
)

# Fields of related models that are not off when false, 0 or empty: the values under which the forward pass is the plain
# one (1 == 1.0 == True). Every other unknown field passes only when null, false, 0 or empty.
NEUTRAL = {
    "causal": (True,),
    "embedding_multiplier": (1,),
    "is_causal": (True,),
    "is_decoder": (True, False),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "partial_rotary_factor": (1,),
    "residual_multiplier": (1,),
    "rotary_pct": (1,),
    "use_rope": (True,),
}
