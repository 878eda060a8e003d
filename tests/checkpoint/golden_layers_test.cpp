// Every unquantised golden layer computed: each dtype of hidden, instruction set, number of
// threads, size of workspace and way of holding weights, against the golden output and bit by bit
// with one another. golden_cases_test.cpp has checked that the weights were read right.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "backends/cpu/cpu_isa.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/golden.h"
#include "formats/float_bits.h"
#include "formats/format.h"
#include "fusedmoe/fusedmoe.h"
#include "reference/random_layer.h"
#include "reference/reference_moe.h"
#include "reference/tolerance.h"
#include "test_files.h"

namespace fusedmoe::checkpoint {
namespace {

using nlohmann::json;

// Hidden in another dtype; bf16 and f16 are exact in f32, f32 is rounded once.
std::vector<std::byte> convert(const ConstMatrixView& from, DType dtype) {
  const std::int64_t bytes = bytes_per_element(dtype);
  std::vector<std::byte> result(from.rows * from.columns * bytes);
  for (std::int64_t i = 0; i < from.rows * from.columns; ++i) {
    const auto value =
        static_cast<float>(fusedmoe::element(from, i / from.columns, i % from.columns));
    const std::uint16_t half = dtype == DType::f16 ? f32_to_f16(value) : f32_to_bf16(value);
    std::memcpy(result.data() + i * bytes,
                dtype == DType::f32 ? static_cast<const void*>(&value) : &half,
                static_cast<std::size_t>(bytes));
  }
  return result;
}

// A layer's weights as stacks: as they are, or gathered from its source.
class Stacks {
 public:
  Stacks(const ExpertWeights& weights, std::int64_t num_experts) : view_(weights) {
    if (!weights.source) return;
    for (std::int64_t e = 0; e < num_experts; ++e) {
      const ExpertWeights one = weights.source(e);
      add(one.w13, w13_);
      add(one.w13_up, w13_up_);
      add(one.w2, w2_);
      add(one.w13_bias, w13_bias_);
      add(one.w2_bias, w2_bias_);
    }
    view_.source = {};
    view_.w13.data = w13_.data();
    view_.w2.data = w2_.data();
    if (!w13_up_.empty()) view_.w13_up.data = w13_up_.data();
    if (!w13_bias_.empty()) view_.w13_bias.data = w13_bias_.data();
    if (!w2_bias_.empty()) view_.w2_bias.data = w2_bias_.data();
  }
  const ExpertWeights& view() const { return view_; }

 private:
  static void add(const WeightTensor& tensor, std::vector<std::byte>& to) {
    if (tensor.empty()) return;
    ASSERT_EQ(tensor.row_stride, 0);
    const auto* from = static_cast<const std::byte*>(tensor.data);
    to.insert(to.end(), from, from + format_info(tensor.format).bytes(tensor.outputs * tensor.inputs));
  }
  static void add(const BiasTensor& bias, std::vector<std::byte>& to) {
    if (bias.empty()) return;
    const auto* from = static_cast<const std::byte*>(bias.data);
    to.insert(to.end(), from, from + bias.size * bytes_per_element(bias.dtype));
  }

  ExpertWeights view_;
  std::vector<std::byte> w13_, w13_up_, w2_, w13_bias_, w2_bias_;
};

class GoldenLayer : public testing::TestWithParam<json> {
 protected:
  const json entry_ = GetParam();
  const std::filesystem::path folder_ = kGolden / entry_["name"].get<std::string>();
};

// The ways to hold one layer's weights, with what is needed to build a plan of each.
struct Way {
  const char* name;
  ExpertWeights weights;
  WeightStorage storage;
};

std::vector<Way> ways_of(const ExpertWeights& own, const ExpertWeights& stacks) {
  ExpertWeights source = stacks;
  source.source = [stacks](std::int64_t expert) { return slice(stacks, expert); };
  return {{"the checkpoint's", own, WeightStorage::own},
          {"packed", stacks, WeightStorage::own},
          {"borrowed", stacks, WeightStorage::borrowed},
          {"source", source, WeightStorage::own}};
}

TEST_P(GoldenLayer, EveryWayOfRunningItGivesTheExpectedOutput) {
  const Checkpoint checkpoint = Checkpoint::open(folder_);
  const std::vector<Golden> goldens = read_goldens(folder_);
  ASSERT_FALSE(goldens.empty());
  for (const Golden& golden : goldens) {
    const MoeLayer* const layer = checkpoint.find_layer(golden.layer);
    ASSERT_NE(layer, nullptr);
    const Stacks stacks(layer->weights, layer->config.num_experts);
    const std::int64_t tokens = golden.hidden.rows;
    const ConstMatrixView expected_view = golden.expected.view();
    std::vector<double> expected;
    for (std::int64_t i = 0; i < tokens * expected_view.columns; ++i) {
      expected.push_back(
          fusedmoe::element(expected_view, i / expected_view.columns, i % expected_view.columns));
    }
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      MoeConfig config = layer->config;
      config.dtype = dtype;
      config.output_dtype.reset();
      const json& limit_entry = entry_["tolerance"][dtype == DType::f32   ? "f32"
                                                    : dtype == DType::f16 ? "f16"
                                                                          : "bf16"];
      const Errors limit{limit_entry["rel_l2"], limit_entry["max_error"]};
      const std::vector<std::byte> hidden = convert(golden.hidden.view(), dtype);
      for (const cpu::CpuIsa isa : cpu::all_isas()) {
        if (!cpu::is_available(isa)) continue;
        std::vector<std::byte> first;
        for (const Way& way : ways_of(layer->weights, stacks.view())) {
          for (const int threads : {1, 2, 7}) {
            PlanOptions options;
            options.isa = to_string(isa);
            options.max_threads = threads;
            options.weight_storage = way.storage;
            const FusedMoe plan = FusedMoe::create(config, way.weights, options);
            for (const WorkspaceSize size :
                 {plan.workspace_size(tokens), plan.min_workspace_size()}) {
              WorkspaceBuffer workspace(Device::cpu(), size);
              std::fill(workspace.span().begin(), workspace.span().end(), std::byte{0xff});
              std::vector<std::byte> output(hidden.size(), std::byte{0xff});
              plan.apply({output.data(), dtype, tokens, config.hidden_size},
                         {hidden.data(), dtype, tokens, config.hidden_size},
                         golden.topk_weights.view(), golden.topk_ids.view(), workspace);
              if (first.empty()) {
                first = output;
                const Errors errors =
                    compare({output.data(), dtype, tokens, config.hidden_size}, expected);
                EXPECT_TRUE(within(errors, limit))
                    << "layer " << golden.layer << " " << to_string(dtype) << " " << to_string(isa)
                    << ": rel_l2 " << errors.rel_l2 << ", max_error " << errors.max_error;
              }
              ASSERT_EQ(output, first)
                  << "layer " << golden.layer << " " << to_string(dtype) << " " << to_string(isa)
                  << ", " << way.name << ", " << threads << " threads, " << size.bytes << " bytes";
            }
          }
        }
      }
    }
  }
}

// The oracle itself against the references' outputs, on the weights as the checkpoint gives them.
TEST_P(GoldenLayer, TheOracleGivesTheExpectedOutput) {
  const Checkpoint checkpoint = Checkpoint::open(folder_);
  for (const Golden& golden : read_goldens(folder_)) {
    const MoeLayer* const layer = checkpoint.find_layer(golden.layer);
    ASSERT_NE(layer, nullptr);
    const std::vector<double> oracle =
        reference_moe(layer->config, layer->weights, golden.hidden.view(),
                      golden.topk_weights.view(), golden.topk_ids.view());
    const Errors errors = compare(golden.expected.view(), oracle);
    EXPECT_LT(errors.rel_l2, 1e-6);
    EXPECT_LT(errors.max_error, 1e-6);
    ASSERT_FALSE(golden.expected_hf.empty());
    EXPECT_LT(compare(golden.expected_hf.view(), oracle).rel_l2, 1e-5);
  }
}

std::vector<json> unquantised() {
  std::vector<json> result;
  const json manifest = json::parse(std::ifstream(kGolden / "manifest.json"));
  for (const json& entry : manifest["cases"]) {
    const std::string format = entry["format"];
    if (entry["container"] == "safetensors" && (format == "bf16" || format == "f32")) {
      result.push_back(entry);
    }
  }
  return result;
}

std::string case_name(const testing::TestParamInfo<json>& info) { return info.param["name"]; }
INSTANTIATE_TEST_SUITE_P(Golden, GoldenLayer, testing::ValuesIn(unquantised()), case_name);

}  // namespace
}  // namespace fusedmoe::checkpoint
