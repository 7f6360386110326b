// Goal: the Google Benchmark programs run through and measure what their names say. Method: each
// for a moment, its results read as JSON.

#include <gtest/gtest.h>

#include <string>

#include "tests/benchmarks/run_program.h"

namespace tessera::benchmarks {
namespace {

// The benchmarks of a program, by name.
nlohmann::json results_of(const std::string& program, const std::string& filter) {
  const Outcome outcome =
      run_program(program + " --benchmark_min_time=0.01 --benchmark_format=json" +
                  " --benchmark_filter=" + filter + " 2>/dev/null");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  const nlohmann::json report = nlohmann::json::parse(outcome.output);
  nlohmann::json by_name;
  for (const nlohmann::json& result : report.at("benchmarks")) {
    EXPECT_FALSE(result.value("error_occurred", false)) << result;
    by_name[result.at("name").get<std::string>()] = result;
  }
  return by_name;
}

TEST(LayoutBenchmark, RunsAllNumbersOfParameters) {
  const nlohmann::json results = results_of("benchmarks/engine/layout_benchmark", "world:512");
  for (const std::string name :
       {"BM_LayoutConstruct", "BM_LayoutQueriesOfARank", "BM_LayoutGaps"}) {
    for (const std::string params : {"10", "1000", "10000"}) {
      const std::string full = name + "/params:" + params + "/world:512";
      ASSERT_TRUE(results.contains(full)) << results.dump(1);
      EXPECT_GT(results.at(full).at("items_per_second").get<double>(), 0);
    }
  }
}

TEST(CollectivesBenchmark, RunsOursAndC10dsOnTheSameBytes) {
  const nlohmann::json results =
      results_of("benchmarks/comm/collectives_benchmark", "bytes:262144");
  EXPECT_EQ(results.size(), 6u);
  for (const std::string name : {"all_gather", "reduce_scatter", "all_reduce"}) {
    for (const std::string who : {"ours", "c10d"}) {
      const std::string full = "BM_Collective/" + name + "_" + who + "/bytes:262144/real_time";
      ASSERT_TRUE(results.contains(full)) << results.dump(1);
      EXPECT_GT(results.at(full).at("bytes_per_second").get<double>(), 0);
    }
  }
}

}  // namespace
}  // namespace tessera::benchmarks
