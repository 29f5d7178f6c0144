"""Encoders of the zoo, and models with an encoder and a decoder."""

from dataclasses import replace
from typing import Any

from .specimen import CLASSES, DROPOUT, Specimen, from_config
from .text import (
    TOKENS,
    VOCABULARY,
    class_losses,
    make_labelled_text,
    make_masked_text,
    make_pretraining_sentences,
    make_sentences,
    make_translations,
    masked_token_losses,
    translation_losses,
    two_task_losses,
)

# What the configurations of BERT and its relatives share.
BERT_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": TOKENS,
    "num_labels": CLASSES,
    "hidden_dropout_prob": DROPOUT,
    "attention_probs_dropout_prob": DROPOUT,
}

BERT = Specimen(
    from_config("BertForSequenceClassification", **BERT_LIKE),
    make_sentences,
    class_losses,
    sizes=(1, 4, TOKENS),
    invisible=("key.bias",),
)
T5 = Specimen(
    from_config(
        "T5ForConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_heads=2,
        relative_attention_num_buckets=4,
        relative_attention_max_distance=4,
        dropout_rate=DROPOUT,
        decoder_start_token_id=0,
    ),
    make_translations,
    translation_losses,
    sizes=(1, 4, TOKENS),
)

ENCODERS: dict[str, Specimen] = {
    "bert": BERT,
    "bert-two-tasks": replace(
        BERT,
        build=from_config("BertForPreTraining", **BERT_LIKE),
        make_batch=make_pretraining_sentences,
        compute_losses=two_task_losses,
    ),
    "roberta": replace(
        BERT,
        # Positions are counted from behind the index that pads.
        build=from_config(
            "RobertaForMaskedLM", **(BERT_LIKE | {"max_position_embeddings": TOKENS + 2})
        ),
        make_batch=make_masked_text,
        compute_losses=masked_token_losses,
    ),
    "distilbert": replace(
        BERT,
        build=from_config(
            "DistilBertForSequenceClassification",
            vocab_size=VOCABULARY,
            max_position_embeddings=TOKENS,
            dim=8,
            hidden_dim=12,
            n_layers=2,
            n_heads=2,
            num_labels=CLASSES,
            dropout=DROPOUT,
            attention_dropout=DROPOUT,
        ),
        make_batch=make_labelled_text,
        invisible=("k_lin.bias",),
    ),
    "albert": replace(
        BERT,
        build=from_config(
            "AlbertForSequenceClassification",
            **BERT_LIKE,
            embedding_size=4,
            classifier_dropout_prob=DROPOUT,
        ),
    ),
    "electra": replace(
        BERT, build=from_config("ElectraForSequenceClassification", **BERT_LIKE, embedding_size=4)
    ),
    "t5": T5,
    "bart": replace(
        T5,
        build=from_config(
            "BartForConditionalGeneration",
            vocab_size=VOCABULARY,
            d_model=8,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=12,
            decoder_ffn_dim=12,
            max_position_embeddings=TOKENS,
            dropout=DROPOUT,
            attention_dropout=DROPOUT,
            activation_dropout=DROPOUT,
        ),
        invisible=("k_proj.bias",),
    ),
}
