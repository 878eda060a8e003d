// Cases AR and CT: one binary for every CPU, and no more threads than the system grants.
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "case_layer.h"
#include "support/format_cases.h"

namespace fusedmoe::cases {
namespace {

// Each limit that a machine can have, by option and by environment: right values, and describe()
// says which kernels ran.
TEST(Cases_AR, B141_EveryLimitGivesRightValuesAndIsReported) {
  const MoeConfig config{.hidden_size = 67, .intermediate_size = 35, .num_experts = 5, .top_k = 2};
  const Weights weights = Weights::random(config, 5);
  const char* before = std::getenv("FUSEDMOE_ISA");
  const std::string saved = before == nullptr ? "" : before;
  for (const std::string& isa : isas()) {
    for (const bool by_environment : {true, false}) {
      if (by_environment) ::setenv("FUSEDMOE_ISA", isa.c_str(), 1);
      const FusedMoe plan =
          FusedMoe::create(config, weights.view(), with_isa(by_environment ? "" : isa));
      ::setenv("FUSEDMOE_ISA", saved.c_str(), 1);  // empty is as if unset
      // Sets without a kernel of their own for bf16 take those below.
      const std::string kernels = isa == "avx512_vnni" ? "avx512"
                                  : isa == "amx_int8"  ? "amx_bf16"
                                                       : isa;
      EXPECT_TRUE(says(plan.describe(), {"instruction set " + isa, "gemm1: gemm_" + kernels,
                                         "gemm2: gemm_" + kernels}));
      // What is above it is not chosen, and the text says why.
      if (isa != to_string(cpu::all_isas().back())) {
        const std::string why = by_environment ? "FUSEDMOE_ISA = " : "options.isa = ";
        EXPECT_TRUE(says(plan.describe(), {"instruction set " + isa + " (not ", why + isa}));
      }
      for (const std::int64_t m : {1, 30}) {
        Call call(config, m);
        call.apply(plan);
        EXPECT_TRUE(is_right(config, weights.view(), call)) << isa;
      }
    }
  }
}

// Every format is taken under every limit, and its first call works.
TEST(Cases_AR, B142_EveryFormatUnderEveryLimit) {
  for (const std::string& isa : isas()) {
    for (const test::FormatCase& format : test::format_cases()) {
      for (const DType dtype : kDtypes) {
        const MoeConfig config{.hidden_size = format.k(41),
                               .intermediate_size = format.k(23),
                               .num_experts = 3,
                               .top_k = 2,
                               .dtype = dtype};
        const RandomWeights weights(config, 3, format.options(), 5);
        const Support support = FusedMoe::supports(config, weights.view(), with_isa(isa));
        ASSERT_TRUE(support.ok) << isa << " " << format.name << ": " << support.reason;
        Call call(config, 4);
        call.apply(FusedMoe::create(config, weights.view(), with_isa(isa)));
        EXPECT_TRUE(is_right(config, weights.view(), call)) << isa << " " << format.name;
      }
    }
  }
}

TEST(Cases_CT, B147_ACgroupOfFourCpusGivesFourThreads) {
  std::string name = (std::filesystem::temp_directory_path() / "fusedmoe-XXXXXX").string();
  const std::filesystem::path root = ::mkdtemp(name.data());
  std::filesystem::create_directories(root / "proc/self");
  std::filesystem::create_directories(root / "sys/fs/cgroup");
  std::ofstream(root / "proc/self/cgroup") << "0::/\n";
  std::ofstream(root / "sys/fs/cgroup/cpu.max") << "400000 100000\n";
  EXPECT_EQ(cpu::quota_threads(root.string()), 4);
  std::filesystem::remove_all(root);
}

TEST(Cases_CT, B147_APinnedCallerGetsAPlanOfOneThread) {
  const MoeConfig config{.hidden_size = 24, .intermediate_size = 8, .num_experts = 4, .top_k = 2};
  const Weights weights = Weights::random(config, 4);
  int threads = 0;
  std::string text;
  std::thread([&] {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return;
    int cpu = 0;
    while (!CPU_ISSET(cpu, &set)) ++cpu;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) return;
    const FusedMoe plan = FusedMoe::create(config, weights.view());
    threads = plan.num_threads();
    text = plan.describe();
  }).join();
  if (threads == 0) GTEST_SKIP() << "the system lets no thread change its affinity";
  EXPECT_EQ(threads, 1);
  EXPECT_TRUE(says(text, {"threads 1 (affinity mask of 1 CPUs)"}));
}

}  // namespace
}  // namespace fusedmoe::cases
