"""The transformers architectures of the zoo, each built small from its configuration, with random weights.

A case names a model class, a configuration class and what is smaller than usual; inputs are derived as for any user
(`harness.example_inputs`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DECODER = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ENCODER = {key: value for key, value in DECODER.items() if key != "num_key_value_heads"}
GPT = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
SEQ2SEQ = {
    "vocab_size": 128,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5_SIZES = {
    "vocab_size": 128,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Architecture:
    """One transformers model: its classes by name, and what its configuration changes."""

    name: str
    model: str
    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    nested: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # sub-configurations by attribute


def _decoder(name: str, prefix: str, **more: Any) -> Architecture:
    return Architecture(name, f"{prefix}ForCausalLM", f"{prefix}Config", {**DECODER, **SPECIAL_TOKENS, **more})


def _encoder(name: str, prefix: str, **more: Any) -> Architecture:
    return Architecture(name, f"{prefix}ForMaskedLM", f"{prefix}Config", {**ENCODER, **more})


def _vision(name: str, prefix: str, **more: Any) -> Architecture:
    return Architecture(name, f"{prefix}ForImageClassification", f"{prefix}Config", {**VISION, **more})


TEXT_TOWER = {**ENCODER, **SPECIAL_TOKENS, "projection_dim": 32}
IMAGE_TOWER = {**VISION, "projection_dim": 32}

ARCHITECTURES: tuple[Architecture, ...] = (
    # decoder language models
    _decoder("LLaMA", "Llama"),
    _decoder("Mistral", "Mistral", sliding_window=16),
    _decoder("Qwen2", "Qwen2"),
    _decoder("Qwen3", "Qwen3", head_dim=16),
    _decoder("Gemma", "Gemma", head_dim=16),
    _decoder("Gemma 2", "Gemma2", head_dim=16, sliding_window=16),
    Architecture(
        "Gemma 3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**DECODER, **SPECIAL_TOKENS, "head_dim": 16, "sliding_window": 16},
    ),
    _decoder("Phi", "Phi"),
    _decoder("Phi-3", "Phi3"),
    _decoder("StableLM", "StableLm"),
    _decoder("Cohere", "Cohere"),
    _decoder("OLMo", "Olmo"),
    _decoder("OLMo 2", "Olmo2"),
    _decoder("SmolLM3", "SmolLM3"),
    _decoder("Granite", "Granite"),
    _decoder("Starcoder2", "Starcoder2"),
    _decoder("Helium", "Helium", head_dim=16),
    _decoder("Nemotron", "Nemotron"),
    _decoder("GLM", "Glm", head_dim=16),
    _decoder("GPT-NeoX", "GPTNeoX"),
    Architecture("GPT-2", "GPT2LMHeadModel", "GPT2Config", GPT),
    Architecture("GPT-J", "GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 8}),
    Architecture(
        "GPT-Neo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 128,
            "window_size": 16,
        },
    ),
    Architecture("GPT-BigCode", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT),
    Architecture("CodeGen", "CodeGenForCausalLM", "CodeGenConfig", {**GPT, "rotary_dim": 8, "n_ctx": 128}),
    _decoder("Falcon", "Falcon", new_decoder_architecture=False),
    Architecture(
        "OPT",
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 64,
        },
    ),
    Architecture(
        "BLOOM",
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    ),
    Architecture(
        "MPT",
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": 128, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "expansion_ratio": 2},
    ),
    Architecture(
        "XGLM",
        "XGLMForCausalLM",
        "XGLMConfig",
        {
            "vocab_size": 128,
            "d_model": 64,
            "ffn_dim": 128,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 128,
        },
    ),
    Architecture(
        "BioGPT",
        "BioGptForCausalLM",
        "BioGptConfig",
        {**ENCODER, **SPECIAL_TOKENS},
    ),
    # mixtures of experts
    _decoder("Mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    _decoder(
        "Qwen2-MoE",
        "Qwen2Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    _decoder("Qwen3-MoE", "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=16),
    _decoder("OLMoE", "Olmoe", num_experts=4, num_experts_per_tok=2),
    _decoder("Phi-MoE", "Phimoe", num_local_experts=4, num_experts_per_tok=2),
    _decoder(
        "DeepSeek-V3",
        "DeepseekV3",
        num_key_value_heads=4,
        moe_intermediate_size=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    Architecture(
        "gpt-oss",
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **DECODER,
            **SPECIAL_TOKENS,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
        },
    ),
    # state spaces and recurrences
    Architecture(
        "Mamba",
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
    Architecture(
        "Mamba 2",
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": 128,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    Architecture(
        "RWKV",
        "RwkvForCausalLM",
        "RwkvConfig",
        {
            "vocab_size": 128,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "attention_hidden_size": 32,
            "context_length": 16,
        },
    ),
    Architecture(
        "RecurrentGemma",
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {**DECODER, **SPECIAL_TOKENS, "num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 16},
    ),
    # encoders
    _encoder("BERT", "Bert"),
    _encoder("RoBERTa", "Roberta"),
    _encoder("DeBERTa", "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _encoder("DeBERTa v2", "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    Architecture(
        "DistilBERT",
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": 128, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 128},
    ),
    _encoder("ELECTRA", "Electra", embedding_size=32),
    _encoder("ALBERT", "Albert", embedding_size=32),
    _encoder("MPNet", "MPNet"),
    _encoder("ModernBERT", "ModernBert", pad_token_id=0, local_attention=16),
    _encoder("RoFormer", "RoFormer", embedding_size=64),
    _encoder("CamemBERT", "Camembert"),
    _encoder("XLM-RoBERTa", "XLMRoberta"),
    Architecture(
        "Funnel",
        "FunnelForMaskedLM",
        "FunnelConfig",
        {
            "vocab_size": 128,
            "d_model": 64,
            "n_head": 4,
            "d_head": 16,
            "d_inner": 128,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
        },
    ),
    Architecture(
        "XLNet",
        "XLNetLMHeadModel",
        "XLNetConfig",
        {"vocab_size": 128, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128},
    ),
    Architecture(
        "Longformer",
        "LongformerForMaskedLM",
        "LongformerConfig",
        {**ENCODER, "attention_window": [8, 8]},
    ),
    Architecture("FNet", "FNetForMaskedLM", "FNetConfig", ENCODER),
    # encoder and decoder
    Architecture("T5", "T5ForConditionalGeneration", "T5Config", T5_SIZES),
    Architecture("mT5", "MT5ForConditionalGeneration", "MT5Config", T5_SIZES),
    Architecture("BART", "BartForConditionalGeneration", "BartConfig", SEQ2SEQ),
    Architecture("Pegasus", "PegasusForConditionalGeneration", "PegasusConfig", SEQ2SEQ),
    Architecture("Marian", "MarianMTModel", "MarianConfig", SEQ2SEQ),
    Architecture("M2M-100", "M2M100ForConditionalGeneration", "M2M100Config", SEQ2SEQ),
    Architecture(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64},
    ),
    Architecture(
        "Whisper encoder",
        "WhisperForAudioClassification",
        "WhisperConfig",
        {**SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64},
    ),
    # images
    _vision("ViT", "ViT"),
    _vision("DeiT", "DeiT"),
    _vision("BEiT", "Beit"),
    _vision("DINOv2", "Dinov2"),
    Architecture(
        "Swin",
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    Architecture(
        "ConvNeXt",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"image_size": 32, "hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 2},
    ),
    Architecture(
        "ResNet",
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    ),
    Architecture(
        "RegNet",
        "RegNetForImageClassification",
        "RegNetConfig",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8},
    ),
    Architecture(
        "MobileNetV2",
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        {"image_size": 32, "depth_multiplier": 0.25},
    ),
    Architecture(
        "SegFormer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "image_size": 32,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 32,
        },
    ),
    Architecture(
        "PoolFormer",
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "padding": [1, 1],
        },
    ),
    # images and text
    Architecture(
        "CLIP",
        "CLIPModel",
        "CLIPConfig",
        {"projection_dim": 32},
        {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER},
    ),
    Architecture(
        "SigLIP",
        "SiglipModel",
        "SiglipConfig",
        {},
        {"text_config": {**TEXT_TOWER, "projection_size": 64}, "vision_config": IMAGE_TOWER},
    ),
    # audio
    Architecture(
        "Wav2Vec2",
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            **ENCODER,
            "conv_dim": [32, 32],
            "conv_kernel": [8, 4],
            "conv_stride": [8, 4],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
    ),
    Architecture(
        "HuBERT",
        "HubertForCTC",
        "HubertConfig",
        {
            **ENCODER,
            "conv_dim": [32, 32],
            "conv_kernel": [8, 4],
            "conv_stride": [8, 4],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
    ),
)


def build(architecture: Architecture) -> Any:
    """The model, with random weights, in eval mode; needs transformers."""
    import torch
    import transformers

    torch.manual_seed(0)
    nested = {name: dict(sizes) for name, sizes in architecture.nested.items()}
    config = getattr(transformers, architecture.config)(**architecture.settings, **nested)
    for owner in (config, *(getattr(config, name) for name in nested)):
        if hasattr(owner, "use_cache"):
            owner.use_cache = False
    return getattr(transformers, architecture.model)(config).eval()
