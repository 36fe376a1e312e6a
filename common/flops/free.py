"""Rules of what computes nothing: operators that make, move, choose or compare numbers."""

from __future__ import annotations

from common.flops.rules import NOTHING, Call, Count, add


def _nothing(_: Call) -> Count:
    return NOTHING


add(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like new_zeros ones "
    "ones_like new_ones full full_like new_full fill zero arange range linspace logspace eye scalar_tensor "
    "tril_indices triu_indices bartlett_window blackman_window hamming_window hann_window kaiser_window fft_fftfreq "
    "fft_rfftfreq _efficientzerotensor _new_zeros_with_same_feature_meta complex",
    _nothing,
    flops="0",
    reason="makes a tensor from no other, or from the parts of one",
)
add(
    "rand rand_like randn randn_like randint randint_like randperm random normal normal_functional uniform bernoulli "
    "exponential multinomial cauchy log_normal geometric poisson binomial _standard_gamma _sample_dirichlet",
    _nothing,
    flops="0",
    reason="random numbers: the generator's work is no arithmetic on data",
)
add(
    "clone copy _to_copy _copy_from _pin_memory contiguous lift lift_fresh_copy cat stack _chunk_cat _stack "
    "block_diag repeat repeat_interleave flip roll rot90 constant_pad_nd reflection_pad1d reflection_pad2d "
    "reflection_pad3d replication_pad1d replication_pad2d replication_pad3d pixel_shuffle pixel_unshuffle "
    "channel_shuffle tril triu diag_embed narrow_copy set resize resize_as _unsafe_view _reshape_alias _conj_physical "
    "conj_physical unsafe_split unsafe_split_with_sizes im2col record_stream _pack_padded_sequence _foreach_copy "
    "_foreach_zero quantize_per_tensor dequantize lift_fresh detach_ squeeze_ unsqueeze_ t_ transpose_ as_strided_ "
    "to_padded_tensor _jagged_to_padded_dense_forward _padded_dense_to_jagged_forward _nested_tensor_from_mask "
    "_nested_tensor_from_tensor_list _nested_tensor_from_mask_left_aligned "
    "_nested_from_padded _nested_tensor_size _nested_tensor_strides _nested_tensor_storage_offsets "
    "_cudnn_rnn_flatten_weight _cudnn_init_dropout_state _mkldnn_reshape _mkldnn_transpose "
    "mkldnn_reorder_conv2d_weight to_mkldnn _to_dense diagonal_scatter select_scatter slice_scatter "
    "as_strided_scatter to_sparse to_sparse_csr _to_sparse _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc "
    "_sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors _sparse_compressed_tensor_unsafe "
    "_sparse_csr_tensor_unsafe sparse_resize sparse_resize_and_clear sparse_mask _sparse_mask_projection",
    _nothing,
    flops="0",
    reason="copies, moves or casts",
)
add(
    "index gather take select_backward slice_backward diagonal_backward index_select index_fill index_copy put_ "
    "embedding masked_select masked_scatter masked_scatter_backward masked_fill where _unsafe_index "
    "_unsafe_masked_index scatter nonzero nonzero_static _local_scalar_dense is_same_size is_pinned max_unpool2d "
    "max_unpool3d embedding_renorm upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d",
    _nothing,
    flops="0",
    reason="indexing and selection: values are chosen, none is computed",
)
add(
    "eq ne lt le gt ge equal isnan isinf isposinf isneginf isin allclose logical_and logical_or logical_xor "
    "logical_not bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift all any "
    "_is_all_true _is_any_true signbit count_nonzero max min amax amin aminmax _aminmax maximum minimum fmax fmin "
    "clamp clamp_min clamp_max argmax argmin sort topk kthvalue median nanmedian mode msort argsort searchsorted "
    "bucketize cummax cummin _cummax_helper _cummin_helper _unique _unique2 unique_dim unique_consecutive "
    "unique_dim_consecutive bincount histc heaviside nan_to_num max_pool2d_with_indices max_pool3d_with_indices "
    "adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d mkldnn_max_pool2d mkldnn_max_pool3d "
    "_foreach_clamp_min _foreach_clamp_max _foreach_maximum _foreach_minimum _foreach_max _assert_async "
    "_assert_scalar _assert_tensor_metadata _functional_assert_async sym_constrain_range sym_constrain_range_for_size "
    "_fused_sdp_choice _has_same_storage_numel is_coalesced _use_cudnn_ctc_loss _linalg_check_errors "
    "_validate_sparse_coo_tensor_args _validate_sparse_compressed_tensor_args dim sym_size sym_stride sym_numel "
    "sym_storage_offset is_contiguous is_strides_like_format is_non_overlapping_and_dense prim::layout prim::device "
    "profiler::_record_function_enter profiler::_record_function_enter_new profiler::_record_function_exit",
    _nothing,
    flops="0",
    reason="comparisons, and what is made of them: maxima, sorting, limits, max pooling; checks and marks",
)
