// Every single allocation while a checkpoint is opened fails once: an exception, no leak of memory,
// files or maps, and never a crash. A binary of its own, since it replaces operator new.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <optional>
#include <string>

#include "checkpoint/checkpoint.h"
#include "checkpoint/golden.h"
#include "fusedmoe/error.h"

namespace {

std::atomic<long> g_until_failure{-1};  // negative: never
std::atomic<bool> g_keep_failing{false};
std::atomic<long> g_live{0};

void* allocate(std::size_t size) {
  const long left = g_until_failure.load();
  if (left == 0) {
    if (!g_keep_failing) g_until_failure = -1;
    throw std::bad_alloc();
  }
  if (left > 0) g_until_failure = left - 1;
  void* const memory = std::malloc(size > 0 ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  ++g_live;
  return memory;
}

void release(void* memory) noexcept {
  if (memory == nullptr) return;
  --g_live;
  std::free(memory);
}

}  // namespace

// The defaults of new[], nothrow new and sized delete forward to these.
void* operator new(std::size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }

namespace fusedmoe::checkpoint {
namespace {

const std::filesystem::path kGolden = FUSEDMOE_GOLDEN_DIR;

long open_files() {
  long count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    count += entry.path().empty() ? 0 : 1;
  }
  return count;
}

long maps_of_checkpoints() {
  std::ifstream maps("/proc/self/maps");
  long count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/golden/") != std::string::npos) ++count;
  }
  return count;
}

// Fails allocation 0, 1, 2, ... of `body` until it needs no more of them; returns how many there
// were. With keep_failing, every allocation after that one fails too.
template <typename Body>
long fail_each(bool keep_failing, Body&& body) {
  for (long n = 0; n < 1'000'000; ++n) {
    const long live = g_live;
    g_keep_failing = keep_failing;
    g_until_failure = n;
    try {
      body();
    } catch (const std::bad_alloc&) {
    } catch (const std::exception& error) {
      g_until_failure = -1;
      ADD_FAILURE() << "allocation " << n << ": " << error.what();
      return n;
    }
    const bool reached = g_until_failure <= 0;
    g_until_failure = -1;
    EXPECT_EQ(g_live.load(), live) << "allocation " << n;
    if (!reached) return n;
  }
  ADD_FAILURE() << "does not end";
  return 0;
}

class AllocationFailure : public testing::TestWithParam<const char*> {};

TEST_P(AllocationFailure, WhileOpening) {
  const std::filesystem::path path = kGolden / GetParam();
  Checkpoint::open(path);  // what is allocated once per process
  const long files = open_files();
  for (const bool keep_failing : {false, true}) {
    const long count = fail_each(keep_failing, [&] {
      const Checkpoint checkpoint = Checkpoint::open(path);
      for (const MoeLayer& layer : checkpoint.layers()) {
        if (layer.weights.source) layer.weights.source(0);
      }
    });
    EXPECT_GT(count, 50);
  }
  EXPECT_EQ(open_files(), files);
  EXPECT_EQ(maps_of_checkpoints(), 0);
}

TEST_P(AllocationFailure, WhileListingAndReadingGoldens) {
  const std::filesystem::path path = kGolden / GetParam();
  inspect_checkpoint(path);
  fail_each(false, [&] { inspect_checkpoint(path); });
  fail_each(false, [&] { read_goldens(path); });
  EXPECT_EQ(maps_of_checkpoints(), 0);
}

INSTANTIATE_TEST_SUITE_P(Golden, AllocationFailure,
                         testing::Values("mixtral_bf16", "gpt_oss_bf16", "qwen3_moe_bf16_shards",
                                         "dbrx_bf16", "nemotron_h_relu2_bf16", "gptq_int4",
                                         "ct_int4_group128_asym", "modelopt_nvfp4", "gpt_oss_mxfp4",
                                         "gguf_q4_0_fused", "gguf_mxfp4"));

// The message of an error needs memory too.
TEST(AllocationFailureOfErrors, WhileRefusing) {
  for (const char* const name : {"missing_expert", "index_outside_folder", "missing_scale"}) {
    const std::filesystem::path path = kGolden / "bad" / name;
    const auto refuse = [&] {
      try {
        Checkpoint::open(path);
      } catch (const Error&) {
      }
    };
    refuse();
    fail_each(false, refuse);
    fail_each(true, refuse);
  }
}

}  // namespace
}  // namespace fusedmoe::checkpoint
