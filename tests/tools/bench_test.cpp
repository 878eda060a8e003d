// The parts of `fusedmoe bench` that can be checked by hand, and one tiny run of the whole verb.
#include <gtest/gtest.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>

#include "bench_allocations.h"
#include "bench_floor.h"
#include "bench_inputs.h"
#include "bench_random.h"
#include "bench_step.h"
#include "format_spec.h"
#include "formats/format.h"
#include "formats/quantize.h"
#include "fusedmoe/error.h"
#include "model_shapes.h"
#include "probes.h"
#include "reference/reference_moe.h"
#include "verbs.h"

namespace fusedmoe::tool {
namespace {

// --- Shapes -----------------------------------------------------------------------------------

TEST(ModelShapes, KnowsTheModelsByName) {
  const auto sizes = [](const char* name) {
    const MoeConfig config = find_model(name).config;
    return std::vector<std::int64_t>{config.hidden_size, config.intermediate_size,
                                     config.num_experts, config.top_k};
  };
  using Sizes = std::vector<std::int64_t>;
  EXPECT_EQ(sizes("qwen3-30b-a3b"), (Sizes{2048, 768, 128, 8}));
  EXPECT_EQ(sizes("qwen3.6-35b-a3b"), (Sizes{2048, 512, 256, 8}));
  EXPECT_EQ(sizes("gpt-oss-20b"), (Sizes{2880, 2880, 32, 4}));
  EXPECT_EQ(sizes("mixtral-8x7b"), (Sizes{4096, 14336, 8, 2}));
  EXPECT_EQ(sizes("olmoe"), (Sizes{2048, 1024, 64, 8}));
  EXPECT_EQ(sizes("deepseek-v3"), (Sizes{7168, 2048, 256, 8}));
  EXPECT_EQ(sizes("tiny"), (Sizes{256, 128, 8, 2}));
  EXPECT_EQ(model_shapes().size(), 7U);
  EXPECT_THROW(find_model("qwen"), Error);
}

TEST(ModelShapes, GptOssHasBiasesAndItsOwnActivation) {
  const ModelShape shape = find_model("gpt-oss-20b");
  EXPECT_TRUE(shape.bias);
  EXPECT_EQ(shape.config.activation.kind, Activation::swigluoai);
  EXPECT_EQ(shape.config.gate_up_layout, GateUpLayout::interleaved);
}

TEST(ModelShapes, DeepseekIsOneOfEightRanks) {
  const ModelShape shape = find_model("deepseek-v3");
  EXPECT_EQ(shape.num_local_experts(), 32);
  const std::vector<std::int32_t> map = shape.expert_map().resolve(256);
  EXPECT_EQ(map[31], 31);
  EXPECT_EQ(map[32], -1);
}

TEST(ModelShapes, ParsesAShape) {
  const ModelShape shape = parse_shape("64,32,4,2");
  EXPECT_EQ(shape.config.hidden_size, 64);
  EXPECT_EQ(shape.config.intermediate_size, 32);
  EXPECT_EQ(shape.config.num_experts, 4);
  EXPECT_EQ(shape.config.top_k, 2);
  for (const char* bad : {"", "64", "64,32,4", "64,32,4,2,1", "64,32,4,", "64,32,x,2", "64,32,0,2",
                          "64 32 4 2", "64,-32,4,2", "99999999999999999999,1,1,1"}) {
    EXPECT_THROW(parse_shape(bad), Error) << bad;
  }
}

// --- Counting and the floor -------------------------------------------------------------------

const FormatSpec kBf16;

TEST(Floor, CountsWhatIsActive) {
  ModelShape shape = parse_shape("10,6,4,2");
  shape.config.dtype = DType::bf16;
  // An expert: w13 12 x 10 and w2 10 x 6 weights of 2 bytes.
  EXPECT_EQ(expert_bytes(shape, kBf16), (120 + 60) * 2);
  EXPECT_EQ(expert_bytes(shape, FormatSpec{WeightFormat::f32}), (120 + 60) * 4);
  EXPECT_EQ(layer_bytes(shape, kBf16), 4 * 360);
  // Three tokens; experts 2, 0 and 3 have rows, one slot is skipped.
  const std::vector<std::int32_t> ids = {2, 0, 2, -1, 3, 0};
  const Work work = count_work(shape, kBf16, ids, std::vector<std::int32_t>{0, 1, 2, 3});
  EXPECT_EQ(work.active_experts, 3);
  EXPECT_EQ(work.rows, 5);
  EXPECT_EQ(work.bytes, 3 * 360 + 3 * 10 * 2 * 2);
  EXPECT_EQ(work.operations, 2 * 5 * 180);
  // The same on a rank that holds experts 0 and 1 only.
  const Work local = count_work(shape, kBf16, ids, std::vector<std::int32_t>{0, 1, -1, -1});
  EXPECT_EQ(local.active_experts, 1);
  EXPECT_EQ(local.rows, 2);
}

TEST(Floor, BiasesAndUngatedExperts) {
  ModelShape shape = parse_shape("10,6,4,2");
  shape.bias = true;
  EXPECT_EQ(expert_bytes(shape, kBf16), 360 + (12 + 10) * 4);
  shape.config.activation.kind = Activation::relu2;
  EXPECT_EQ(expert_bytes(shape, kBf16), (60 + 60) * 2 + (6 + 10) * 4);
}

TEST(Floor, IsTheLargerOfTwoTimes) {
  const Work work{.active_experts = 1, .rows = 1, .bytes = 50e6, .operations = 2e9};
  EXPECT_DOUBLE_EQ(floor_us(work, {50, 1000}), 2000);  // 50 MB at 50 GB/s: 1 ms; 2 GFLOP: 2 ms
  EXPECT_DOUBLE_EQ(floor_us(work, {10, 1000}), 5000);  // 5 ms
}

TEST(Floor, ExpectedActiveExperts) {
  const ModelShape tiny = find_model("tiny");
  EXPECT_DOUBLE_EQ(expected_active_experts(tiny, 1), 2);
  EXPECT_DOUBLE_EQ(expected_active_experts(tiny, 2), 3.5);
  EXPECT_DOUBLE_EQ(expected_active_experts(find_model("deepseek-v3"), 1), 1);
}

TEST(Floor, Spread) {
  const Spread odd = spread_of({3, 1, 2});
  EXPECT_EQ(odd.median, 2);
  EXPECT_EQ(odd.min, 1);
  EXPECT_EQ(odd.max, 3);
  EXPECT_EQ(spread_of({4, 1, 2, 3}).median, 2.5);
}

// --- Inputs -----------------------------------------------------------------------------------

TEST(Inputs, RoutingsDifferAndStepsMoveTheSameBytes) {
  BenchSetup setup;
  setup.shape = find_model("tiny");
  constexpr std::int64_t kLayers = 9;
  const BenchInputs inputs(setup, 5, kLayers);
  std::set<const Routing*> in_step;
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    const Routing& routing = inputs.routing(3, layer);
    EXPECT_TRUE(in_step.insert(&routing).second);
    EXPECT_NE(&routing, &inputs.routing(4, layer));
    ASSERT_EQ(routing.topk_ids.size(), 10U);
    for (std::size_t token = 0; token < 5; ++token) {
      EXPECT_NE(routing.topk_ids[2 * token], routing.topk_ids[2 * token + 1]);
      EXPECT_NEAR(routing.topk_weights[2 * token] + routing.topk_weights[2 * token + 1], 1, 1e-6);
    }
  }
  // Few layers still see several routings.
  const BenchInputs few(setup, 5, 1);
  EXPECT_NE(few.routing(0, 0).topk_ids, few.routing(1, 0).topk_ids);
}

TEST(Inputs, RandomFloatsAreFiniteAndOfOneSize) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    std::vector<std::uint64_t> words(1000, 0);
    fill_random(words, signed_floats(dtype, -7), 1, 2);
    std::set<std::uint64_t> different(words.begin(), words.end());
    EXPECT_EQ(different.size(), words.size());
    const ConstMatrixView floats(words.data(), dtype, 1, 8000 / bytes_per_element(dtype));
    int negative = 0;
    for (std::int64_t i = 0; i < floats.columns; ++i) {
      const double value = element(floats, 0, i);
      EXPECT_GE(std::abs(value), 1.0 / 128);
      EXPECT_LT(std::abs(value), 1.0 / 32);
      negative += value < 0 ? 1 : 0;
    }
    EXPECT_NEAR(static_cast<double>(negative) / static_cast<double>(floats.columns), 0.5, 0.05);
  }
}

// Every code is a number, and weights of all formats have about the same size, so that layers of
// any size have outputs near 1.
TEST(Inputs, RandomWeightsOfEveryFormatAreFiniteAndOfOneSize) {
  for (const char* name :
       {"f32", "f16", "bf16", "fp8_e4m3", "fp8_e4m3:tensor:f16", "fp8_e4m3:channel:bf16",
        "fp8_e5m2", "fp8_e5m2:16x256:f16", "mxfp8", "mxfp4", "nvfp4", "int8", "int8:128:f16",
        "int4", "int4:32:zp", "int4:channel:f32", "q4_k", "q5_k", "q6_k"}) {
    const FormatSpec spec = parse_format(name);
    RandomStack stack(spec, tensor_of(spec, 2, 64, 512));
    for (const std::uint64_t seed : {1, 2}) {
      stack.fill(seed, 2);
      double squares = 0;
      double sum = 0;
      const std::vector<float> values = dequantize(stack.view());
      ASSERT_EQ(values.size(), 2U * 64 * 512);
      for (const float value : values) {
        ASSERT_TRUE(std::isfinite(value)) << name;
        squares += static_cast<double>(value) * static_cast<double>(value);
        sum += static_cast<double>(value);
      }
      const auto count = static_cast<double>(values.size());
      const double root_mean = std::sqrt(squares / count);
      EXPECT_GT(root_mean, 1.0 / 256) << name;
      EXPECT_LT(root_mean, 1.0 / 16) << name;
      EXPECT_LT(std::abs(sum / count), 0.7 * root_mean) << name;
    }
  }
}

// --- Allocations ------------------------------------------------------------------------------

// Calls the functions themselves: the compiler may drop a new-expression, but not a call.
TEST(AllocationCounter, CountsEveryFormWhileArmed) {
  AllocationCounter counter;
  ::operator delete(::operator new(1));
  EXPECT_EQ(counter.allocations(), 0);
  void* kept = nullptr;
  {
    const auto armed = counter.arm();
    ::operator delete(::operator new(100));
    ::operator delete[](::operator new[](100), std::size_t{100});
    ::operator delete(::operator new(100, std::nothrow), std::nothrow);
    ::operator delete[](::operator new[](100, std::nothrow), std::nothrow);
    constexpr std::align_val_t kAligned{256};
    kept = ::operator new(1000, kAligned);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(kept) % 256, 0U);
    ::operator delete[](::operator new[](100, kAligned), kAligned);
    ::operator delete(::operator new(100, kAligned, std::nothrow), kAligned, std::nothrow);
    ::operator delete[](::operator new[](100, kAligned, std::nothrow), std::size_t{100}, kAligned);
    std::thread([] { ::operator delete(::operator new(10)); }).join();
  }
  EXPECT_GE(counter.allocations(), 9);  // and what std::thread takes for its state
  EXPECT_GE(counter.peak_bytes(), 1100);
  EXPECT_LT(counter.peak_bytes(), 1400);
  ::operator delete (kept, std::align_val_t{256});
}

TEST(AllocationCounter, PeakIsOfWhatLivesAtOnce) {
  AllocationCounter counter;
  void* first = nullptr;
  {
    const auto armed = counter.arm();
    first = ::operator new(100);
    ::operator delete(::operator new(50));
  }
  ::operator delete(first);  // known, though nothing is armed
  {
    const auto armed = counter.arm();
    ::operator delete(::operator new(120));
  }
  EXPECT_EQ(counter.peak_bytes(), 150);
  EXPECT_EQ(counter.allocations(), 3);
}

// --- The verb ---------------------------------------------------------------------------------

std::vector<nlohmann::json> bench(std::vector<std::string> arguments, int expected_code) {
  // A name of its own for each test process.
  const auto file = std::filesystem::temp_directory_path() /
                    ("bench_test_" + std::to_string(getpid()) + ".jsonl");
  arguments.insert(arguments.begin(), "bench");
  arguments.insert(arguments.end(), {"--json-file", file.string()});
  CLI::App app("test", "fusedmoe");
  Verb verb;
  add_bench(app, verb);
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes a vector
  app.parse(arguments);
  EXPECT_EQ(verb.run(), expected_code);
  std::vector<nlohmann::json> rows;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) rows.push_back(nlohmann::json::parse(line));
  std::filesystem::remove(file);
  return rows;
}

TEST(Bench, RowsOfATinyRun) {
  const auto rows = bench({"--model", "tiny", "--layers", "2", "--tokens", "1,3", "--threads", "2",
                           "--seconds", "0.1", "--workspace-modes"},
                          kExitFine);
  ASSERT_EQ(rows.size(), 6U);
  const std::set<std::string> keys = {"model",
                                      "hidden_size",
                                      "intermediate_size",
                                      "num_experts",
                                      "top_k",
                                      "format",
                                      "dtype",
                                      "mode",
                                      "device",
                                      "isa",
                                      "threads",
                                      "num_tokens",
                                      "layers",
                                      "workspace_mode",
                                      "active_experts",
                                      "bytes_moved",
                                      "operations",
                                      "time_us",
                                      "floor_us",
                                      "ratio",
                                      "bandwidth_gbs",
                                      "peak_gflops",
                                      "peak_instruction",
                                      "best_peak_gflops",
                                      "bandwidth_probes_gbs",
                                      "peak_probes_gflops",
                                      "other_cpu_share",
                                      "allocations_per_call",
                                      "launches_per_call",
                                      "scratch_bytes",
                                      "peak_scratch_bytes",
                                      "bit_equal"};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const nlohmann::json& row = rows[i];
    std::set<std::string> found;
    for (const auto& [key, value] : row.items()) found.insert(key);
    EXPECT_EQ(found, keys);
    EXPECT_EQ(row["model"], "tiny");
    EXPECT_EQ(row["format"], "bf16");
    EXPECT_EQ(row["dtype"], "bf16");
    EXPECT_EQ(row["layers"], 2);
    EXPECT_EQ(row["num_tokens"], i < 3 ? 1 : 3);
    EXPECT_EQ(row["bit_equal"], true);
    EXPECT_GT(row["time_us"]["min"], 0.0);
    EXPECT_LE(row["time_us"]["min"], row["time_us"]["median"]);
    EXPECT_LE(row["time_us"]["median"], row["time_us"]["max"]);
    EXPECT_GT(row["bandwidth_gbs"], 0.0);
    EXPECT_GT(row["peak_gflops"], 0.0);
    EXPECT_GE(row["best_peak_gflops"].get<double>(), 0.9 * row["peak_gflops"].get<double>());
    const std::int64_t scratch = row["scratch_bytes"];
    const std::string mode = row["workspace_mode"];
    EXPECT_EQ(mode, std::vector<std::string>({"allocate", "per_layer", "shared"})[i % 3]);
    if (mode == "allocate") {
      EXPECT_GE(row["allocations_per_call"], 1);
    } else {
      EXPECT_EQ(row["allocations_per_call"], 0);
    }
    EXPECT_EQ(row["peak_scratch_bytes"], mode == "per_layer" ? 2 * scratch : scratch);
  }
  EXPECT_EQ(rows[0]["active_experts"], 2);
  EXPECT_EQ(rows[0]["bytes_moved"], 2 * 3 * 256 * 128 * 2 + 2 * 256 * 2);
}

TEST(Bench, OneRowPerTokensWithoutModes) {
  const auto rows = bench({"--shape", "48,20,4,2", "--layers", "3", "--tokens", "2", "--dtype",
                           "f32", "--format", "f16", "--threads", "1", "--seconds", "0.1"},
                          kExitFine);
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0]["workspace_mode"], "shared");
  EXPECT_EQ(rows[0]["dtype"], "f32");
  EXPECT_EQ(rows[0]["format"], "f16");
  EXPECT_EQ(rows[0]["threads"], 1);
  EXPECT_EQ(rows[0]["launches_per_call"], 0);  // nothing to fork for one thread
}

TEST(Bench, EveryFormatRuns) {
  for (const FormatInfo& info : all_formats()) {
    const auto rows = bench({"--shape", "256,256,4,2", "--layers", "2", "--tokens", "5", "--format",
                             info.name, "--threads", "2", "--seconds", "0.02"},
                            kExitFine);
    ASSERT_EQ(rows.size(), 1U) << info.name;
    EXPECT_EQ(rows[0]["format"], to_string(parse_format(info.name)));
    EXPECT_EQ(rows[0]["bit_equal"], true) << info.name;
    const auto load = bench({"--shape", "256,256,4,2", "--format", info.name, "--load"}, kExitFine);
    ASSERT_EQ(load.size(), 2U) << info.name;
    EXPECT_GE(load[0]["packed_bytes"], 4 * load[0]["expert_bytes"].get<std::int64_t>())
        << info.name;
  }
}

TEST(Bench, ScalesAreInTheNameAndInTheBytes) {
  const std::vector<std::string> shape = {"--shape",   "256,128,2,2", "--layers",  "2",
                                          "--tokens",  "1",           "--threads", "1",
                                          "--seconds", "0.02"};
  const auto run = [&](const std::string& format) {
    std::vector<std::string> arguments = shape;
    arguments.insert(arguments.end(), {"--format", format});
    return bench(arguments, kExitFine).at(0);
  };
  constexpr std::int64_t kWeights = 3 * 256 * 128, kTokens = 2 * 256 * 2;
  const nlohmann::json int4 = run("int4:64:zp:bf16");
  EXPECT_EQ(int4["format"], "int4:64:bf16:zp");
  // Both experts are active: codes, two bytes a group, half a byte for its zero point.
  EXPECT_EQ(int4["bytes_moved"],
            2 * (kWeights / 2 + kWeights / 64 * 2 + kWeights / 64 / 2) + kTokens);
  const nlohmann::json tensor = run("fp8_e4m3:tensor");
  EXPECT_EQ(tensor["format"], "fp8_e4m3:tensor");
  EXPECT_EQ(tensor["bytes_moved"], 2 * (kWeights + 3 * 4) + kTokens);  // gate, up, down
}

// Where the machine has no kernels for it but those that are slow on purpose, the reason.
TEST(Bench, ModeA8RunsOrIsRefused) {
  std::vector<std::string> arguments = {"--shape",   "64,64,4,2", "--layers", "2",      "--tokens",
                                        "3",         "--format",  "int8",     "--mode", "a8",
                                        "--seconds", "0.02",      "--isa",    "scalar"};
  const auto rows = bench(arguments, kExitFine);
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0]["mode"], "a8");
  arguments[7] = "mxfp4";
  EXPECT_THROW(bench(arguments, kExitFine), Error);
  arguments[9] = "a4";
  EXPECT_THROW(bench(arguments, kExitFine), Error);
}

TEST(Bench, LoadHasRowsOfItsOwn) {
  const auto rows = bench({"--model", "tiny", "--load"}, kExitFine);
  ASSERT_EQ(rows.size(), 2U);
  EXPECT_EQ(rows[0]["load"], "source");
  EXPECT_EQ(rows[1]["load"], "stacks");
  for (const nlohmann::json& row : rows) {
    EXPECT_GE(row["packed_bytes"], 8 * 3 * 256 * 128 * 2);
    EXPECT_GT(row["pack_gbs"], 0.0);
  }
}

TEST(Bench, RefusesWhatItCannotRun) {
  EXPECT_THROW(bench({"--model", "tiny", "--format", "bf17"}, kExitFine), Error);
  // Blocks of 256 inputs: w2 has 128.
  EXPECT_THROW(bench({"--model", "tiny", "--format", "q4_k"}, kExitFine), Error);
  EXPECT_THROW(bench({"--model", "tiny", "--dtype", "i8"}, kExitFine), Error);
  EXPECT_THROW(bench({"--model", "tiny", "--shape", "1,1,1,1"}, kExitFine), CLI::ParseError);
  EXPECT_THROW(bench({"--model", "tiny", "--tokens", "0"}, kExitFine), CLI::ParseError);
  EXPECT_THROW(bench({"--model", "mixtral-8x7b", "--layers", "1000000"}, kExitFine), Error);
}

TEST(Probes, MeasureSomething) {
  EXPECT_GT(last_level_cache_bytes(), 0);
  EXPECT_GT(available_memory_bytes(), 0);
  const Peaks peaks = measure_peaks({"scalar", DType::f32}, DType::bf16, 1);
  EXPECT_GT(peaks.gflops, 0);
  EXPECT_GE(peaks.best_gflops, peaks.gflops);
  EXPECT_FALSE(peaks.instruction.empty());
}

// Integers have a ceiling of their own where the machine multiplies them, else that of floats.
TEST(Probes, IntegersHaveAPeak) {
  const CpuKernel kernel = cpu_kernel("", WeightFormat::int8, DType::bf16, ComputeMode::a8);
  ASSERT_EQ(kernel.operands, DType::i8);
  const Peaks peaks = measure_peaks(kernel, DType::i8, 1);
  EXPECT_GT(peaks.gflops, 0);
  for (const PeakLoop& loop : peak_loops()) {
    if (!loop.available || loop.operands != DType::i8 || loop.isa != kernel.isa) continue;
    EXPECT_EQ(peaks.instruction, loop.instruction);
  }
}

}  // namespace
}  // namespace fusedmoe::tool
