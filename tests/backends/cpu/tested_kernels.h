// The gemm kernels as the tests run them: every line of kernels.inc, and the AMX kernel once more
// on the model of its tiles, which every machine runs. Buffers have exactly the size that the table
// gives them, end at a page that may not be touched, and hold NaN before.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "backends/cpu/kernels/amx_kernels.h"
#include "backends/cpu/kernels/amx_model.h"
#include "backends/cpu/pack.h"
#include "kernel_inputs.h"
#include "support/guarded_buffer.h"

namespace fusedmoe::cpu {

struct TestedKernel {
  GemmKernel gemm;
  GemmInputs inputs;
  bool available;
};

inline void gemm_on_model(const GemmTile& tile) { gemm_tiles<AmxModel>(tile); }

inline std::vector<TestedKernel> tested_kernels() {
  std::vector<TestedKernel> all;
  for (const GemmKernel& kernel : gemm_kernels()) {
    all.push_back({kernel, inputs_of(kernel), is_available(kernel.isa)});
    if (kernel.isa != CpuIsa::amx_bf16) continue;
    TestedKernel model = all.back();
    model.gemm.name = "gemm_amx_model_bf16";
    model.gemm.run = &gemm_on_model;
    model.available = true;  // load_rows_amx_bf16_bf16 is plain C++, too
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

// One product: x [rows][most_k] in the type of the kernel's inputs, w [most_k][32] in its format.
struct Product {
  std::int64_t most_k;
  std::vector<float> x, w;

  Product(const TestedKernel& kernel, int rows, std::int64_t k)
      : most_k(k),
        x(numbers(rows * k, 2, kernel.inputs.dtype)),
        w(numbers(k * kPanelOutputs, 1, dtype_of(kernel.gemm.format))) {}
  float& x_at(int row, std::int64_t k) { return x[static_cast<std::size_t>(row * most_k + k)]; }
  float& w_at(std::int64_t k, int n) { return w[static_cast<std::size_t>(k * kPanelOutputs + n)]; }
};

class GemmRunner {
 public:
  GemmRunner(const TestedKernel& kernel, std::int64_t most_k)
      : kernel_(kernel),
        rows_(kernel.inputs.bytes(kernel.inputs.max_rows, most_k)),
        panel_(kernel.inputs.panel.padded(most_k) * kPanelOutputs * 4),
        sums_(kernel.inputs.padded_rows(kernel.inputs.max_rows) * kPanelOutputs * 4) {}

  // [rows][32]: rows first .. first + rows of x, over [0, k) in pieces that end at `ends` and at k.
  // Behind its k, each row and each output of the source holds NaN.
  std::vector<float> run(const Product& in, int first, int rows, std::int64_t k,
                         std::vector<std::int64_t> ends = {}) {
    const GemmInputs& inputs = kernel_.inputs;
    const std::int64_t stride = k + kBehind;
    std::vector<std::byte> x(static_cast<std::size_t>(rows * stride * bytes_of(inputs.dtype)),
                             std::byte{0xff});
    std::vector<const void*> from;
    for (int r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < k; ++i) {
        store(x.data(), inputs.dtype, r * stride + i,
              in.x[static_cast<std::size_t>((first + r) * in.most_k + i)]);
      }
      from.push_back(x.data() + r * stride * bytes_of(inputs.dtype));
    }
    const DType dtype = dtype_of(kernel_.gemm.format);
    std::vector<std::byte> w(static_cast<std::size_t>(kPanelOutputs * stride * bytes_of(dtype)),
                             std::byte{0xff});
    PanelOutputs outputs{{}, {}, static_cast<int>(bytes_of(dtype))};
    for (std::int64_t n = 0; n < kPanelOutputs; ++n) {
      for (std::int64_t i = 0; i < k; ++i) {
        store(w.data(), dtype, n * stride + i,
              in.w[static_cast<std::size_t>(i * kPanelOutputs + n)]);
      }
      outputs.output[static_cast<std::size_t>(n)] = w.data() + n * stride * bytes_of(dtype);
      outputs.k_stride[static_cast<std::size_t>(n)] = bytes_of(dtype);
    }

    const std::int64_t padded_rows = inputs.padded_rows(rows);
    auto* sums = reinterpret_cast<float*>(
        sums_.take(padded_rows * kPanelOutputs * static_cast<std::int64_t>(sizeof(float))));
    ends.push_back(k);
    std::int64_t k0 = 0;
    for (const std::int64_t end : ends) {
      const std::int64_t length = end - k0;
      std::byte* loaded = rows_.take(inputs.bytes(rows, length));
      inputs.load_rows({from.data(), inputs.dtype, k0, length, rows, loaded});
      std::byte* panel = panel_.take(inputs.panel.padded(length) * kPanelOutputs * bytes_of(dtype));
      copy_panel(outputs, k0, length, inputs.panel, panel);
      // What comes next may be prefetched, not read: it is the guard.
      kernel_.gemm.run({loaded, rows, panel, length, panel_.end(), sums, k0 == 0});
      EXPECT_TRUE(rows_.front_is_untouched() && panel_.front_is_untouched() &&
                  sums_.front_is_untouched());
      k0 = end;
    }
    return {sums, sums + rows * kPanelOutputs};
  }

 private:
  static constexpr std::int64_t kBehind = 40;
  TestedKernel kernel_;
  LastBytes rows_, panel_, sums_;
};

}  // namespace fusedmoe::cpu
