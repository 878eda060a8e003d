// Which instruction set and how many threads: names, limits, the environment, affinity, cgroups.
#include "backends/cpu/cpu_isa.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fusedmoe/fusedmoe.h"
#include "support/environment.h"

namespace fusedmoe::cpu {
namespace {

// FUSEDMOE_ISA for the length of a test.
struct IsaEnvironment : test::ScopedEnvironment {
  explicit IsaEnvironment(const char* value) : ScopedEnvironment("FUSEDMOE_ISA", value) {}
};

// The best set up to `top` that is worth it on this machine; `top` itself when it was named.
CpuIsa best_up_to(CpuIsa top, bool named) {
  CpuIsa best = CpuIsa::scalar;
  for (const CpuIsa isa : all_isas()) {
    if (isa > top || !is_available(isa)) continue;
    if (is_fast(isa, cpu_facts()) || (named && isa == top)) best = isa;
  }
  return best;
}

TEST(CpuIsaTest, NamesAreUniqueAndInOrderOfPreference) {
  std::set<std::string> names;
  for (std::size_t i = 0; i < all_isas().size(); ++i) {
    EXPECT_TRUE(names.insert(to_string(all_isas()[i])).second);
    EXPECT_TRUE(i == 0 || all_isas()[i - 1] < all_isas()[i]);
  }
  EXPECT_STREQ(to_string(CpuIsa::scalar), "scalar");
  EXPECT_STREQ(to_string(CpuIsa::avx2_fma), "avx2");
  EXPECT_STREQ(to_string(CpuIsa::avx512), "avx512");
  EXPECT_STREQ(to_string(CpuIsa::avx512_vnni), "avx512_vnni");
  EXPECT_STREQ(to_string(CpuIsa::avx512_bf16), "avx512_bf16");
  EXPECT_STREQ(to_string(CpuIsa::amx_bf16), "amx_bf16");
  EXPECT_STREQ(to_string(CpuIsa::amx_int8), "amx_int8");
  EXPECT_EQ(all_isas().size(), 7U);
  EXPECT_EQ(all_isas().front(), CpuIsa::scalar);
  EXPECT_TRUE(is_available(CpuIsa::scalar));
}

TEST(CpuIsaTest, AvailabilityIsWhatTheSystemSays) {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string flags;
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("flags", 0) == 0) flags = line + " ";
  }
  if (flags.empty()) GTEST_SKIP() << "no flags in /proc/cpuinfo";
  const auto has = [&](const char* flag) {
    return flags.find(std::string(" ") + flag + " ") != std::string::npos;
  };
  const bool avx2 = has("avx2") && has("fma") && has("f16c");
  const bool avx512 =
      avx2 && has("avx512f") && has("avx512bw") && has("avx512dq") && has("avx512vl");
  EXPECT_EQ(is_available(CpuIsa::avx2_fma), avx2);
  EXPECT_EQ(is_available(CpuIsa::avx512), avx512);
  EXPECT_EQ(is_available(CpuIsa::avx512_bf16), avx512 && has("avx512_bf16"));
#ifndef FUSEDMOE_AMX_MODEL
  if (is_available(CpuIsa::amx_bf16)) {  // the kernel may refuse what the processor has
    EXPECT_TRUE(has("amx_bf16") && has("amx_tile") && has("avx512_bf16"));
  }
#endif
}

// Kernels of a set may call on those of every set below it.
TEST(CpuIsaTest, EachIncludesThoseBeforeIt) {
  for (std::size_t i = 1; i < all_isas().size(); ++i) {
    if (!is_available(all_isas()[i])) continue;
    EXPECT_TRUE(is_available(all_isas()[i - 1])) << to_string(all_isas()[i]);
  }
}

TEST(CpuIsaTest, VendorIsAsCpuidSpellsIt) {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("vendor_id", 0) != 0) continue;
    EXPECT_EQ(cpu_facts().vendor, line.substr(line.find(':') + 2));
    return;
  }
  GTEST_SKIP() << "no vendor in /proc/cpuinfo";
}

// A fact of the processor, not of a measurement: its whole table.
TEST(CpuIsaTest, WhatIsFastByVendor) {
  for (const char* vendor : {"GenuineIntel", "AuthenticAMD", "HygonGenuine", ""}) {
    const CpuFacts facts{vendor};
    EXPECT_TRUE(is_fast(CpuIsa::scalar, facts));
    EXPECT_TRUE(is_fast(CpuIsa::avx2_fma, facts));
    EXPECT_TRUE(is_fast(CpuIsa::avx512, facts));
    EXPECT_EQ(is_fast(CpuIsa::avx512_bf16, facts), std::string(vendor) != "GenuineIntel");
#ifdef FUSEDMOE_AMX_MODEL
    EXPECT_FALSE(is_fast(CpuIsa::amx_bf16, facts)) << "the model is for tests";
    EXPECT_FALSE(is_fast(CpuIsa::amx_int8, facts)) << "the model is for tests";
#else
    EXPECT_TRUE(is_fast(CpuIsa::amx_bf16, facts));
    EXPECT_TRUE(is_fast(CpuIsa::amx_int8, facts));
#endif
  }
}

TEST(CpuIsaTest, LimitAndEnvironmentBothCap) {
  const CpuIsa top = all_isas().back();
  for (const CpuIsa limit : all_isas()) {
    {
      const IsaEnvironment none(nullptr);
      EXPECT_EQ(choose_isa(to_string(limit)), best_up_to(limit, true));
      EXPECT_EQ(choose_isa(""), best_up_to(top, false));
      // Named, it is taken wherever it is there, fast or not.
      EXPECT_TRUE(!is_available(limit) || choose_isa(to_string(limit)) == limit);
    }
    const IsaEnvironment environment(to_string(limit));
    EXPECT_EQ(choose_isa(""), best_up_to(limit, true));
    for (const CpuIsa other : all_isas()) {
      EXPECT_EQ(choose_isa(to_string(other)), best_up_to(std::min(limit, other), true));
    }
  }
  const IsaEnvironment empty("");
  EXPECT_EQ(choose_isa(""), best_up_to(top, false));
}

// The default is never a set that its machine runs slower than those below it.
TEST(CpuIsaTest, TheDefaultIsFast) {
  const IsaEnvironment none(nullptr);
  EXPECT_TRUE(is_fast(choose_isa(""), cpu_facts()));
  EXPECT_TRUE(cpu_facts().vendor != "GenuineIntel" || choose_isa("") != CpuIsa::avx512_bf16);
#ifdef FUSEDMOE_AMX_MODEL
  EXPECT_NE(choose_isa(""), CpuIsa::amx_bf16);
#endif
}

TEST(CpuIsaTest, ReasonNamesEverySetThatWasNotChosen) {
  const IsaEnvironment none(nullptr);
  for (const CpuIsa limit : all_isas()) {
    const std::string reason = isa_reason(to_string(limit));
    for (const CpuIsa isa : all_isas()) {
      const std::string why = std::string("not ") + to_string(isa) + ": ";
      const std::size_t at = reason.find(why);
      ASSERT_EQ(at != std::string::npos, isa > choose_isa(to_string(limit))) << reason;
      if (at == std::string::npos) continue;
      const std::string rest = reason.substr(at + why.size());
      const std::string want = isa > limit ? std::string("options.isa = ") + to_string(limit)
                               : is_available(isa) ? "slower than the sets below it"
                                                   : "absent or refused here";
      EXPECT_EQ(rest.rfind(want, 0), 0U) << reason;
    }
  }
  EXPECT_EQ(isa_reason("scalar"),
            "not avx2: options.isa = scalar, not avx512: options.isa = scalar, not avx512_vnni: "
            "options.isa = scalar, not avx512_bf16: options.isa = scalar, not amx_bf16: "
            "options.isa = scalar, not amx_int8: options.isa = scalar");
  const IsaEnvironment environment("scalar");
  EXPECT_EQ(isa_reason("").rfind("not avx2: FUSEDMOE_ISA = scalar", 0), 0U);
}

std::string refusal_of(const std::string& limit) {
  try {
    choose_isa(limit);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "accepted";
}

TEST(CpuIsaTest, UnknownNamesAreRefused) {
  const IsaEnvironment none(nullptr);
  for (const std::string name :
       {"avx3", "AVX2", "avx2_fma", " scalar", "avx2 ", "0", "amx", "avx512bf16"}) {
    const std::string rest =
        ": expected one of scalar, avx2, avx512, avx512_vnni, avx512_bf16, amx_bf16, amx_int8, got "
        "'" +
        name + "'; name one of these";
    EXPECT_EQ(refusal_of(name), "options.isa" + rest);
    const IsaEnvironment environment(name.c_str());
    EXPECT_EQ(refusal_of(""), "FUSEDMOE_ISA" + rest);
  }
}

// A list says what is wrong instead of throwing: an engine that only looks must not fail.
TEST(CpuIsaTest, ABadEnvironmentIsTheReasonInTheListOfDevices) {
  const IsaEnvironment environment("avx3");
  std::string reason;
  for (const DeviceInfo& device : list_devices()) {
    if (device.name == "cpu") reason = device.reason;
  }
  EXPECT_NE(reason.find("FUSEDMOE_ISA: expected one of"), std::string::npos) << reason;
}

// A process pinned to one CPU (here: one thread, whose mask is what counts) gets one thread.
TEST(AvailableThreads, FollowTheAffinityMask) {
  cpu_set_t all;
  CPU_ZERO(&all);
  ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
  const int quota = quota_threads("");
  const int cpus = CPU_COUNT(&all);
  EXPECT_EQ(available_threads(), quota > 0 ? std::min(quota, cpus) : cpus);
  int threads = 0;
  std::string reason;
  std::thread([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &all)) ++cpu;
    CPU_SET(cpu, &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0) return;
    threads = available_threads();
    reason = thread_limit_reason();
  }).join();
  if (threads == 0) GTEST_SKIP() << "the system lets no thread change its affinity";
  EXPECT_EQ(threads, 1);
  EXPECT_EQ(reason, "affinity mask of 1 CPUs");
}

// A copy of the files that tell a process its cgroups.
class Cgroups {
 public:
  explicit Cgroups(const std::string& groups) {
    std::string name = (std::filesystem::temp_directory_path() / "fusedmoe-XXXXXX").string();
    root_ = ::mkdtemp(name.data());
    write("/proc/self/cgroup", groups);
  }
  Cgroups(const Cgroups&) = delete;
  Cgroups& operator=(const Cgroups&) = delete;
  ~Cgroups() { std::filesystem::remove_all(root_); }
  Cgroups& write(const std::string& file, const std::string& content) {
    std::filesystem::create_directories(std::filesystem::path(root_ + file).parent_path());
    std::ofstream(root_ + file) << content;
    return *this;
  }
  int threads() const { return quota_threads(root_); }

 private:
  std::string root_;
};

TEST(QuotaThreads, CgroupV2) {
  EXPECT_EQ(Cgroups("0::/\n").threads(), 0);
  EXPECT_EQ(Cgroups("").write("/sys/fs/cgroup/cpu.max", "400000 100000\n").threads(), 4);
  EXPECT_EQ(Cgroups("0::/\n").write("/sys/fs/cgroup/cpu.max", "max 100000\n").threads(), 0);
  EXPECT_EQ(Cgroups("0::/\n").write("/sys/fs/cgroup/cpu.max", "150000 100000\n").threads(), 2);
  EXPECT_EQ(Cgroups("0::/\n").write("/sys/fs/cgroup/cpu.max", "1000 100000\n").threads(), 1);
  for (const char* broken : {"", "\n", "400000", "x y\n", "400000 0\n", "-1 100000\n"}) {
    EXPECT_EQ(Cgroups("0::/\n").write("/sys/fs/cgroup/cpu.max", broken).threads(), 0) << broken;
  }
  EXPECT_EQ(Cgroups("0::/\n").write("/sys/fs/cgroup/cpu.max", "9e300 1\n").threads(), 1000000);
}

TEST(QuotaThreads, TheTightestOfNestedGroups) {
  Cgroups groups("12:cpuset:/x\n0::/pods/pod1/c\n");
  groups.write("/sys/fs/cgroup/pods/pod1/c/cpu.max", "max 100000\n");
  EXPECT_EQ(groups.threads(), 0);
  groups.write("/sys/fs/cgroup/cpu.max", "1600000 100000\n");
  EXPECT_EQ(groups.threads(), 16);
  groups.write("/sys/fs/cgroup/pods/cpu.max", "300000 50000\n");
  EXPECT_EQ(groups.threads(), 6);
  groups.write("/sys/fs/cgroup/pods/pod1/c/cpu.max", "700000 100000\n");
  EXPECT_EQ(groups.threads(), 6);
  groups.write("/sys/fs/cgroup/pods/pod1/cpu.max", "200000 100000\n");
  EXPECT_EQ(groups.threads(), 2);
  groups.write("/sys/fs/cgroup/pods/pod2/cpu.max", "100000 100000\n");  // another's
  EXPECT_EQ(groups.threads(), 2);
}

TEST(QuotaThreads, CgroupV1) {
  const auto quota = [](Cgroups& groups, const std::string& folder, const std::string& cpus) {
    groups.write("/sys/fs/cgroup/cpu" + folder + "/cpu.cfs_quota_us", cpus + "\n");
    groups.write("/sys/fs/cgroup/cpu" + folder + "/cpu.cfs_period_us", "100000\n");
  };
  // In a container the group's own folder is the mount, whatever the path says.
  Cgroups container("9:memory:/\n3:cpu,cpuacct:/docker/abc\n2:cpuset:/\n0::/\n");
  EXPECT_EQ(container.threads(), 0);
  quota(container, "", "-1");
  EXPECT_EQ(container.threads(), 0);
  quota(container, "", "350000");
  EXPECT_EQ(container.threads(), 4);
  // On a host it is below the mount.
  Cgroups host("3:cpuacct,cpu:/slurm/job\n2:cpuset:/slurm\n");
  quota(host, "", "-1");
  quota(host, "/slurm", "800000");
  EXPECT_EQ(host.threads(), 8);
  quota(host, "/slurm/job", "200000");
  EXPECT_EQ(host.threads(), 2);
}

}  // namespace
}  // namespace fusedmoe::cpu
