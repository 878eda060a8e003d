// The gemm kernels as the tests run them: every line of kernels.inc, and the AMX kernels once more
// on the model of its tiles, which every machine runs. Buffers have exactly the size that the table
// gives them, end at a page that may not be touched, and hold NaN before.
#pragma once

#include <algorithm>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "backends/cpu/kernels/amx_byte_kernels.h"
#include "backends/cpu/kernels/amx_kernels.h"
#include "backends/cpu/kernels/amx_model.h"
#include "backends/cpu/pack.h"
#include "formats/format.h"
#include "formats/scales.h"
#include "kernel_inputs.h"
#include "support/format_cases.h"
#include "support/guarded_buffer.h"

namespace fusedmoe::cpu {

struct TestedKernel {
  GemmKernel gemm;
  GemmInputs inputs;
  bool available;

  bool integers() const { return inputs.dtype == DType::i8; }
  // What rows are made of: of a8, any float.
  DType row_dtype() const { return integers() ? DType::f32 : inputs.dtype; }
  bool plain() const { return format_info(gemm.format).takes(ScaleLayout::none) && !blocks(); }
  bool blocks() const { return format_info(gemm.format).encode == nullptr; }
};

template <Code kCode>
void gemm_on_model(const GemmTile& tile) {
  gemm_bf16_tiles<AmxModel>(tile, decode_steps(kCode));
}
template <Code kCode>
void gemm_on_byte_model(const GemmTile& tile) {
  gemm_byte_tiles<AmxByteModel>(tile, kCode == Code::u4 ? &decode_nibble_bytes : nullptr);
}

inline GemmFunction model_of(const GemmKernel& kernel) {
  if (kernel.isa == CpuIsa::amx_int8) {
    return code_of(kernel.format) == Code::u4 ? &gemm_on_byte_model<Code::u4>
                                              : &gemm_on_byte_model<Code::s8>;
  }
  switch (code_of(kernel.format)) {
    case Code::s8:
      return &gemm_on_model<Code::s8>;
    case Code::e4m3:
      return &gemm_on_model<Code::e4m3>;
    case Code::e5m2:
      return &gemm_on_model<Code::e5m2>;
    case Code::e2m1:
      return &gemm_on_model<Code::e2m1>;
    case Code::u4:
      return &gemm_on_model<Code::u4>;
    default:
      return &gemm_on_model<Code::bf16>;
  }
}

inline std::vector<TestedKernel> tested_kernels() {
  std::vector<TestedKernel> all;
  for (const GemmKernel& kernel : gemm_kernels()) {
    all.push_back({kernel, inputs_of(kernel), is_available(kernel.isa)});
    if (kernel.isa < CpuIsa::amx_bf16) continue;
    TestedKernel model = all.back();
    static std::deque<std::string> names;
    names.push_back(std::string(kernel.name).replace(0, 4, "model"));
    model.gemm.name = names.back().c_str();
    model.gemm.run = model_of(kernel);
    // Plain C++ for weights in bf16, and their rows; codes and bytes take vectors.
    model.available = kernel.format == WeightFormat::bf16 || is_available(CpuIsa::avx512_bf16);
    all.push_back(model);
  }
  return all;
}

inline std::string tested_name(const testing::TestParamInfo<TestedKernel>& info) {
  return info.param.gemm.name;
}
inline void PrintTo(const TestedKernel& kernel, std::ostream* out) { *out << kernel.gemm.name; }

// A test of one of them; skipped, with a message, where the machine has not got it.
class TestedKernelTest : public testing::TestWithParam<TestedKernel> {
 protected:
  void SetUp() override {
    if (!GetParam().available) {
      GTEST_SKIP() << "this machine does not run " << to_string(GetParam().gemm.isa);
    }
  }
};

// The ways of scaling a kernel's format.
inline std::vector<test::FormatCase> scalings(const TestedKernel& kernel) {
  std::vector<test::FormatCase> result;
  for (const test::FormatCase& c : test::all_format_cases()) {
    if (c.format != kernel.gemm.format || c.layout != WeightLayout::nk) continue;
    // Groups that are no whole steps of AMX-INT8 go to another kernel (kernel_choice.cpp).
    if (kernel.gemm.isa == CpuIsa::amx_int8 && c.scales.layout == ScaleLayout::group &&
        c.scales.group_size % 64 != 0) {
      continue;
    }
    result.push_back(c);
  }
  return result;
}

// Memory whose last bytes are handed out again and again, always up to the guard.
class LastBytes {
 public:
  explicit LastBytes(std::int64_t most) : pages_(most + kFront, test::Side::back) {}
  // `bytes` of 0xFF, and canaries in front of them.
  std::byte* take(std::int64_t bytes) {
    begin_ = end() - bytes;
    std::memset(begin_, 0xff, static_cast<std::size_t>(bytes));
    std::memset(begin_ - kFront, 0x5a, kFront);
    return begin_;
  }
  bool front_is_untouched() const {
    return std::all_of(begin_ - kFront, begin_, [](std::byte b) { return b == std::byte{0x5a}; });
  }
  std::byte* end() const { return pages_.data() + pages_.span().size(); }

 private:
  static constexpr std::int64_t kFront = 64;
  test::GuardedBuffer pages_;
  std::byte* begin_ = nullptr;
};

// The 32 rows of one panel, [32][most_k] in a kernel's format, as a tensor of its own that may be
// cut to its first k inputs. Behind the rows lie 0xFF bytes.
class PanelWeights {
 public:
  PanelWeights(const test::FormatCase& scaling, std::int64_t k, const std::vector<float>& values)
      : scaling_(scaling), values_(values), most_k_(k) {
    WeightTensor tensor{.format = scaling.format,
                        .experts = 1,
                        .outputs = kPanelOutputs,
                        .inputs = k,
                        .scales = scaling.scales};
    const std::int64_t block = scaling.info().block_elements;
    tensor.row_stride = (k + block - 1) / block * block + 2 * block;
    stack_ =
        quantize(values, tensor, {.zero_points = scaling.zero_points, .fill = std::byte{0xff}});
  }

  const test::FormatCase& scaling() const { return scaling_; }
  std::int64_t most_k() const { return most_k_; }
  const WeightTensor& whole() const { return stack_.tensor; }
  double value(std::int64_t n, std::int64_t k) const {
    return scaling_.info().decode(whole(), 0, n, k);
  }
  void set(std::int64_t n, std::int64_t k, double value) {
    scaling_.info().encode(stack_.data.data(), whole(), 0, n, k, value);
  }
  std::byte* bytes() { return stack_.data.data(); }
  QuantizedStack& stack() { return stack_; }

  // Inputs [0, k): scales are dense, so the cut has some of its own.
  class Cut {
   public:
    Cut(const PanelWeights& from, std::int64_t k) : tensor_(from.whole()) {
      tensor_.inputs = k;
      const WeightScales& scales = from.whole().scales;
      if (scales.layout == ScaleLayout::none) return;
      const ScaleShape shape = scale_shape(tensor_);
      const std::int64_t size = bytes_per_scale(scales.type);
      scales_.resize(static_cast<std::size_t>(shape.count() * size));
      zeros_.resize(static_cast<std::size_t>(scales.zero_points == nullptr ? 0 : shape.count()));
      for (std::int64_t row = 0; row < shape.rows; ++row) {
        for (std::int64_t column = 0; column < shape.columns; ++column) {
          const std::int64_t to = scale_index(tensor_, 0, row, column);
          const std::int64_t at = scale_index(from.whole(), 0, row, column);
          std::memcpy(scales_.data() + to * size,
                      static_cast<const std::byte*>(scales.data) + at * size,
                      static_cast<std::size_t>(size));
          if (zeros_.empty()) continue;
          zeros_[static_cast<std::size_t>(to)] =
              static_cast<const std::uint8_t*>(scales.zero_points)[at];
        }
      }
      tensor_.scales.data = scales_.data();
      tensor_.scales.zero_points = zeros_.empty() ? nullptr : zeros_.data();
    }
    Cut(const Cut&) = delete;
    Cut& operator=(const Cut&) = delete;
    const WeightTensor& tensor() const { return tensor_; }

   private:
    WeightTensor tensor_;
    std::vector<std::byte> scales_;
    std::vector<std::uint8_t> zeros_;
  };

 private:
  test::FormatCase scaling_;
  std::vector<float> values_;
  std::int64_t most_k_;
  QuantizedStack stack_;
};

inline PanelOutputs outputs_of(const WeightTensor& tensor, std::int64_t count = kPanelOutputs) {
  PanelOutputs outputs;
  for (std::int64_t n = 0; n < count; ++n) {
    outputs[static_cast<std::size_t>(n)] = {&tensor, 0, n};
  }
  return outputs;
}

// One product: x [rows][most_k] in the type of the kernel's inputs, w [32][most_k] in its format.
struct Product {
  std::int64_t most_k;
  std::vector<float> x;
  PanelWeights w;

  Product(const TestedKernel& kernel, const test::FormatCase& scaling, int rows, std::int64_t k)
      : Product(kernel, scaling, rows, k, numbers(k * kPanelOutputs, 1)) {}
  Product(const TestedKernel& kernel, const test::FormatCase& scaling, int rows, std::int64_t k,
          const std::vector<float>& weights)
      : most_k(k), x(numbers(rows * k, 2, kernel.row_dtype())), w(scaling, k, weights) {}
  float& x_at(int row, std::int64_t k) { return x[static_cast<std::size_t>(row * most_k + k)]; }
};

class GemmRunner {
 public:
  GemmRunner(const TestedKernel& kernel, std::int64_t most_k)
      : kernel_(kernel),
        rows_(kernel.inputs.bytes(kernel.inputs.max_rows, most_k)),
        // Codes of 32 bits, or a scale with a zero point for each four k.
        panel_(most_rounded(most_k) * kPanelOutputs * 4 + 4096),
        row_sums_(kernel.inputs.padded_rows(kernel.inputs.max_rows) * (most_k / 4 + 1) * 4),
        row_scales_(kernel.inputs.max_rows * 4),
        sums_(kernel.inputs.padded_rows(kernel.inputs.max_rows) * kPanelOutputs * 4) {}

  // [rows][32]: rows first .. first + rows of x, over [0, k) in pieces that end at `ends` and at k,
  // in mode a8 times the rows' scales. Behind its k, each row of x holds NaN.
  std::vector<float> run(const Product& in, int first, int rows, std::int64_t k,
                         std::vector<std::int64_t> ends = {}) {
    const GemmInputs& inputs = kernel_.inputs;
    const DType dtype = kernel_.row_dtype();
    const std::int64_t stride = k + kBehind;
    x_.assign(static_cast<std::size_t>(rows * stride * bytes_of(dtype)), std::byte{0xff});
    from_.clear();
    for (int r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < k; ++i) {
        store(x_.data(), dtype, r * stride + i,
              in.x[static_cast<std::size_t>((first + r) * in.most_k + i)]);
      }
      from_.push_back(x_.data() + r * stride * bytes_of(dtype));
    }
    const PanelWeights::Cut cut(in.w, k);
    const PanelOutputs outputs = outputs_of(cut.tensor());
    const PanelFormat format = panel_format(cut.tensor(), kernel_.gemm);
    const SegmentLayout& segments = format.segments;
    const bool needs_sums = kernel_.integers() || segments.has_offsets();
    const std::int64_t padded_rows = inputs.padded_rows(rows);
    auto* sums = reinterpret_cast<float*>(
        sums_.take(padded_rows * kPanelOutputs * static_cast<std::int64_t>(sizeof(float))));
    auto* scales = reinterpret_cast<float*>(row_scales_.take(rows * 4));
    ends.push_back(k);
    std::int64_t k0 = 0;
    for (const std::int64_t end : ends) {
      const std::int64_t length = end - k0;
      EXPECT_EQ(k0 % format.period(), 0);
      std::byte* loaded = rows_.take(inputs.bytes(rows, length));
      std::byte* row_sums =
          row_sums_.take(needs_sums ? padded_rows * segments.count(length) * 4 : 0);
      inputs.load_rows({from_.data(), dtype, k0, length, rows, loaded, k,
                        needs_sums ? segments.k : 0, row_sums, scales});
      std::byte* panel = panel_.take(format.bytes(length));
      pack_panel(outputs, format, k0, length, panel);
      // What comes next may be prefetched, not read: it is the guard.
      kernel_.gemm.run({loaded, rows, format.codes(panel, length, 0), length, panel_.end(), sums,
                        k0 == 0, format.segments_of(panel, length, 0),
                        needs_sums ? row_sums : nullptr});
      EXPECT_TRUE(rows_.front_is_untouched() && panel_.front_is_untouched() &&
                  sums_.front_is_untouched() && row_sums_.front_is_untouched() &&
                  row_scales_.front_is_untouched());
      k0 = end;
    }
    std::vector<float> result(sums, sums + rows * kPanelOutputs);
    for (int r = 0; r < rows && kernel_.integers(); ++r) {
      for (int n = 0; n < kPanelOutputs; ++n) result[r * kPanelOutputs + n] *= scales[r];
    }
    return result;
  }

 private:
  static constexpr std::int64_t kBehind = 40;
  static std::int64_t most_rounded(std::int64_t k) { return (k + 255) / 256 * 256; }
  TestedKernel kernel_;
  LastBytes rows_, panel_, row_sums_, row_scales_, sums_;
  std::vector<std::byte> x_;
  std::vector<const void*> from_;
};

}  // namespace fusedmoe::cpu
