#include "cuda/gemm/launch.h"

#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "cuda/gemm/gradient.h"
#include "cuda/gemm/listed.h"
#include "cuda/gemm/rows.h"
#include "cuda/gemm/rows_fp8.h"
#include "cuda/gemm/weights.h"

namespace moe_comm {
namespace gemm {

namespace {

// cuTensorMapEncodeTiled and its constants.
using Encode = int (*)(void* map, int dtype, uint32_t rank, void* at, const uint64_t* sizes, const uint64_t* strides,
                       const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion,
                       int fill);
constexpr int kByte = 0, kFloat = 7, kBf16 = 9, kSwizzle128 = 3, kPromotion256 = 3;
constexpr int kGroup = 8;  // rows of tiles that are visited together

// A map of an array of three dimensions, innermost first; strides of the outer two in elements.
void encode(uintptr_t encode, TensorMap* map, int64_t at, const std::array<int64_t, 3>& sizes,
            const std::array<int64_t, 2>& strides, const std::array<uint32_t, 3>& box, int dtype = kBf16) {
  const int64_t bytes = dtype == kFloat ? 4 : dtype == kByte ? 1 : 2;  // of an element
  const uint64_t dims[] = {static_cast<uint64_t>(sizes[0]), static_cast<uint64_t>(sizes[1]),
                           static_cast<uint64_t>(sizes[2])};
  const uint64_t steps[] = {static_cast<uint64_t>(strides[0] * bytes), static_cast<uint64_t>(strides[1] * bytes)};
  const uint32_t ones[] = {1, 1, 1};
  const int status = reinterpret_cast<Encode>(encode)(map, dtype, 3, reinterpret_cast<void*>(at), dims, steps,
                                                      box.data(), ones, 0, kSwizzle128, kPromotion256, 0);
  if (status != 0) {
    throw p2p::LaunchError("the CUDA driver answers cuTensorMapEncodeTiled with error " + std::to_string(status) +
                           " for a matrix of " + std::to_string(sizes[2]) + " x " + std::to_string(sizes[1]) + " x " +
                           std::to_string(sizes[0]));
  }
}

// A map of a matrix in boxes of 128 rows and 64 columns.
void encode_rows(uintptr_t at, TensorMap* map, const Matrices& m) {
  encode(at, map, m.at, {m.columns, m.rows, 1}, {m.stride, m.rows * m.stride}, {64, 128, 1});
}

// A map of a matrix whose rows have `parts` parts of `width` columns, in boxes of 16 rows and 64 columns.
void encode_parts(uintptr_t at, TensorMap* map, const Matrices& m, int64_t parts, int64_t width) {
  encode(at, map, m.at, {width, parts, m.rows}, {parts > 1 ? width : m.stride, m.stride}, {64, 1, 16});
}

// Into its place: the driver needs maps at multiples of 64 bytes.
void set_rows(uintptr_t encoder, const RowsProduct& p, RowsArgs* to) {
  const bool swiglu = p.act.at != 0;
  const int64_t parts = swiglu && p.limit == 0 ? 2 : 1, width = p.out.columns / (swiglu ? 2 : 1),
                inner = p.rows.columns;
  RowsArgs& a = *to;
  if (p.slots_at != 0) {
    a.taken = {p.rows.at, 2 * p.rows.stride, p.slots_at, static_cast<uint32_t>(p.top_k)};
  } else {
    encode_rows(encoder, &a.rows, p.rows);
  }
  const uint32_t box = p.transposed ? 64 : swiglu ? 128 : 256;
  encode(encoder, &a.w, p.w.at, {p.w.columns, p.w.rows, p.experts}, {p.w.stride, p.w.expert_stride}, {64, box, 1});
  encode_parts(encoder, &a.out, p.out, parts, p.out.columns / parts);
  if (swiglu) encode_parts(encoder, &a.act, p.act, 1, width);
  a.counts_at = p.counts_at;
  a.out_at = p.out.at;
  a.out_stride = p.out.stride;
  a.act_at = p.act.at;
  a.act_stride = p.act.stride;
  a.experts = static_cast<int32_t>(p.experts);
  a.columns = static_cast<int32_t>(width);
  a.inner = static_cast<int32_t>(inner);
  a.group = kGroup;
  a.bias = {p.bias_at, p.bias_stride};
  a.glu = {p.alpha, p.limit};
}

}  // namespace

std::vector<const char*> kernel_names() {
#define MOE_GEMM_NAME(name) #name,
  return {MOE_GEMM_KERNELS(MOE_GEMM_NAME)};
}

Launcher::Launcher(std::shared_ptr<p2p::Starter> starter, uintptr_t encode, int64_t blocks)
    : starter_(std::move(starter)), encode_(encode), blocks_(blocks) {}

void Launcher::rows(const RowsProduct& p, uintptr_t stream) const {
  RowsArgs a{};
  set_rows(encode_, p, &a);
  const bool swiglu = p.act.at != 0, taken = p.slots_at != 0;
  const int kernel = p.transposed ? k_rows_transposed : taken ? k_taken_swiglu : swiglu ? k_rows_swiglu : k_rows;
  starter_->start(kernel, {blocks_, kThreads, kRowsShared, stream, -1}, &a);
}

void Launcher::listed(const ListedProduct& p, uintptr_t stream) const {
  ListedArgs a{};
  static_assert(sizeof a.list == sizeof p.list, "the words of a list");
  set_rows(encode_, p.rows, &a.rows);
  if (p.own.at != 0) encode_rows(encode_, &a.own, p.own);
  std::memcpy(&a.list, p.list.data(), sizeof a.list);
  const int arrived = p.rows.transposed ? k_arrived_transposed : p.rows.act.at != 0 ? k_arrived_swiglu : k_arrived;
  const int kernel = !p.published ? arrived : p.rows.transposed ? k_published_transposed : k_published;
  starter_->start(kernel, {p.blocks, kThreads, kListedShared, stream, -1}, &a);
}

void Launcher::swiglu_gradient(const GradientProduct& p, uintptr_t stream) const {
  GradientArgs a{};
  const int64_t width = p.act.columns, parts = p.limit == 0 ? 2 : 1;
  encode_rows(encode_, &a.grad, p.grad);
  encode(encode_, &a.w, p.w.at, {p.w.columns, p.w.rows, p.experts}, {p.w.stride, p.w.expert_stride}, {64, 64, 1});
  encode_parts(encode_, &a.h, p.h, parts, 2 * width / parts);
  encode_parts(encode_, &a.grad_h, p.grad_h, parts, 2 * width / parts);
  encode_parts(encode_, &a.act, p.act, 1, width);
  a.counts_at = p.counts_at;
  a.grad_h_at = p.grad_h.at;
  a.grad_h_stride = p.grad_h.stride;
  a.act_at = p.act.at;
  a.act_stride = p.act.stride;
  a.weights_at = p.weights_at;
  a.slots_at = p.slots_at;
  a.sections_at = p.sections_at;
  a.rows = p.grad.rows;
  a.experts = static_cast<int32_t>(p.experts);
  a.columns = static_cast<int32_t>(width);
  a.inner = static_cast<int32_t>(p.grad.columns);
  a.group = kGroup;
  a.glu = {p.alpha, p.limit};
  starter_->start(k_swiglu_gradient, {blocks_, kThreads, kGradientShared, stream, -1}, &a);
}

void Launcher::weights(const WeightsProduct& p, uintptr_t stream) const {
  WeightsArgs a{};
  const std::array<uint32_t, 3> box = {64, kGradStep, 1};
  encode(encode_, &a.a, p.a.at, {p.a.columns, p.a.rows, 1}, {p.a.stride, p.a.rows * p.a.stride}, box);
  encode(encode_, &a.b, p.b.at, {p.b.columns, p.b.rows, 1}, {p.b.stride, p.b.rows * p.b.stride}, box);
  encode(encode_, &a.out, p.out.at, {p.out.columns, p.out.rows, p.experts}, {p.out.stride, p.out.expert_stride},
         {p.add ? 32u : 64u, 64, 1}, p.add ? kFloat : kBf16);
  a.counts_at = p.counts_at;
  a.experts = static_cast<int32_t>(p.experts);
  a.rows = static_cast<int32_t>(p.out.rows);
  a.columns = static_cast<int32_t>(p.out.columns);
  a.group = kGroup;
  const int shared = p.add ? gradient_bytes<kAddedStages, kAddedSlots>() : gradient_bytes<kGradStages, kGradSlots>();
  starter_->start(p.add ? k_weights_added : k_weights, {blocks_, kThreads, shared, stream, -1}, &a);
}

void Launcher::rows_fp8(const Fp8Product& p, uintptr_t stream) const {
  const int64_t inner = p.rows.columns, width = p.out.columns;
  Fp8Args a{};
  encode(encode_, &a.rows, p.rows.at, {inner, p.rows.rows, 1}, {p.rows.stride, p.rows.rows * p.rows.stride},
         {kFp8Inner, kTileRows, 1}, kByte);
  encode(encode_, &a.w, p.w.at, {inner, p.w.rows, p.experts}, {p.w.stride, p.w.expert_stride},
         {kFp8Inner, kFp8Columns, 1}, kByte);
  encode(encode_, &a.out, p.out.at, {width, 1, p.out.rows}, {p.out.stride, p.out.stride}, {64, 1, 16});
  a.counts_at = p.counts_at;
  a.scales_at = p.scales_at;
  a.scale_stride = p.scale_stride;
  a.scale_stride_block = p.scale_step;
  a.w_scales_at = p.w_scales_at;
  a.w_scale_stride_expert = p.w_scale_expert_stride;
  a.w_scale_stride_column = p.w_scale_stride;
  a.out_at = p.out.at;
  a.out_stride = p.out.stride;
  a.block_rows = p.block_rows;
  a.experts = static_cast<int32_t>(p.experts);
  a.sources = static_cast<int32_t>(p.sources);
  a.columns = static_cast<int32_t>(width);
  a.inner = static_cast<int32_t>(inner);
  a.group = kGroup;
  starter_->start(k_rows_fp8, {blocks_, kThreads, kFp8Shared, stream, -1}, &a);
}

}  // namespace gemm
}  // namespace moe_comm
