// Values that no code is worth, through quantize and dequantize.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "formats/format.h"
#include "formats/quantize.h"

namespace fusedmoe {
namespace {

TEST(NotFinite, ANanSpoilsWhatSharesItsScale) {
  for (const FormatInfo& format : all_formats()) {
    if (format.takes(ScaleLayout::none)) continue;
    WeightTensor tensor;
    tensor.format = format.format;
    tensor.experts = 2;
    tensor.outputs = 2;
    tensor.inputs = 40;
    tensor.scales = default_scales(format.format);
    std::vector<float> values(160, 0.5F);
    values[3] = -2.0F;  // beside it, of the other sign
    values[7] = std::numeric_limits<float>::quiet_NaN();
    const QuantizedStack stack = quantize(values, tensor);
    const std::vector<float> back = dequantize(stack.tensor);
    const std::int64_t group = tensor.scales.layout == ScaleLayout::group
                                   ? std::min<std::int64_t>(40, tensor.scales.group_size)
                                   : 40;
    for (std::int64_t k = 0; k < group; ++k) EXPECT_TRUE(std::isnan(back[k])) << format.name << k;
    for (std::size_t i = 80; i < back.size(); ++i) {
      EXPECT_TRUE(std::isfinite(back[i])) << format.name << " " << i;
    }
  }
}

}  // namespace
}  // namespace fusedmoe
