// Goal: the same names and contents always give the same token files; nothing is lost unsaid.
// Method: small folders with every kind of entry; expected tokens are spelled out.

#include "data/prepare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "data/token_file.h"
#include "tests/data/file_size_limit.h"
#include "tests/data/scratch.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

// The documents of a token file, split at the separator.
std::vector<std::string> documents_of(const std::string& path) {
  const TokenFile file(path);
  std::vector<std::string> documents(1);
  for (int64_t i = 0; i < file.size(); ++i) {
    if (file[i] == kByteSeparator) {
      documents.emplace_back();
    } else {
      documents.back() += static_cast<char>(file[i]);
    }
  }
  EXPECT_EQ(documents.back(), "") << "the last document has no separator";
  documents.pop_back();
  return documents;
}

using Documents = std::vector<std::string>;

TEST(Prepare, WritesBytesAndASeparatorAfterEachDocument) {
  const Scratch scratch;
  const std::string text = scratch.write("in.txt", "Hi\xff");
  const PrepareResult result = prepare({text}, scratch.path("out"));
  const TokenFile file(scratch.path("out/train.bin"));
  EXPECT_EQ(std::vector<uint16_t>(file.data(), file.data() + file.size()),
            (std::vector<uint16_t>{'H', 'i', 255, 256}));
  EXPECT_EQ(result.train_documents, 1);
  EXPECT_EQ(result.train_tokens, 4);
  EXPECT_EQ(result.val_tokens, 0);
  EXPECT_FALSE(fs::exists(scratch.path("out/val.bin")));
}

TEST(Prepare, TakesFoldersInTheOrderOfTheirPaths) {
  const Scratch scratch;
  scratch.write("in/b.txt", "3");
  scratch.write("in/a/z.txt", "2");
  scratch.write("in/a.txt", "1");  // '.' sorts before '/'
  scratch.write("in/a/.hidden.txt", "x");
  scratch.write("in/.git/config", "x");
  const std::string last = scratch.write("first.txt", "0");
  const PrepareResult result = prepare({last, scratch.path("in")}, scratch.path("out"));
  EXPECT_EQ(documents_of(scratch.path("out/train.bin")), (Documents{"0", "1", "2", "3"}));
  EXPECT_EQ(result.hidden_entries, 2);
}

TEST(Prepare, LeavesOutAndCountsWhatIsNotText) {
  const Scratch scratch;
  scratch.write("in/a.txt", "text");
  scratch.write("in/binary.txt", std::string("ab\0c", 4));
  scratch.write("in/binary_at_8191.txt", std::string(8191, 'a') + std::string(1, '\0'));
  scratch.write("in/empty.txt", "");
  ASSERT_EQ(::mkfifo(scratch.path("in/pipe").c_str(), 0600), 0);
  const PrepareResult result = prepare({scratch.path("in")}, scratch.path("out"));
  EXPECT_EQ(documents_of(scratch.path("out/train.bin")), (Documents{"text"}));
  EXPECT_EQ(result.binary_files, 2);
  EXPECT_EQ(result.empty_files, 1);
  EXPECT_EQ(result.special_files, 1);
}

TEST(Prepare, KeepsALateNulAndFilesLongerThanABlock) {
  const Scratch scratch;
  const std::string late_nul = std::string(8192, 'a') + std::string(1, '\0') + "b";
  std::string longer((1 << 20) * 2 + 7, 'x');
  for (size_t i = 0; i < longer.size(); ++i) longer[i] = static_cast<char>('a' + i % 23);
  scratch.write("in/a", late_nul);
  scratch.write("in/b", longer);
  scratch.write("in/c", std::string(1 << 20, 'c'));
  prepare({scratch.path("in")}, scratch.path("out"));
  EXPECT_EQ(documents_of(scratch.path("out/train.bin")),
            (Documents{late_nul, longer, std::string(1 << 20, 'c')}));
}

TEST(Prepare, FiltersFoldersByExtensionButTakesNamedFiles) {
  const Scratch scratch;
  scratch.write("in/a.txt", "1");
  scratch.write("in/b.md", "2");
  scratch.write("in/c.cc", "x");
  scratch.write("in/txt", "x");
  const std::string named = scratch.write("named.log", "3");
  PrepareOptions options;
  options.extensions = {"txt", ".md"};
  const PrepareResult result = prepare({scratch.path("in"), named}, scratch.path("out"), options);
  EXPECT_EQ(documents_of(scratch.path("out/train.bin")), (Documents{"1", "2", "3"}));
  EXPECT_EQ(result.other_extension_files, 2);
}

TEST(Prepare, EndsOnLinksInALoopAndTakesEachFileOnce) {
  const Scratch scratch;
  const std::string file = scratch.write("in/sub/a.txt", "1");
  fs::create_directory_symlink(scratch.path("in"), scratch.path("in/sub/loop"));
  fs::create_symlink(file, scratch.path("in/b.txt"));
  scratch.write("elsewhere/c.txt", "2");
  fs::create_directory_symlink(scratch.path("elsewhere"), scratch.path("in/linked"));
  const PrepareResult result =
      prepare({scratch.path("in"), file, scratch.path("in")}, scratch.path("out"));
  EXPECT_EQ(documents_of(scratch.path("out/train.bin")), (Documents{"1", "2"}));
  EXPECT_EQ(result.repeated_files, 2);  // in/sub/a.txt after its link in/b.txt, and as named
}

TEST(Prepare, SplitsByNameAndKeepsTheSplitWhenDocumentsAreAdded) {
  const Scratch scratch;
  for (int i = 0; i < 200; ++i) {
    scratch.write("in/" + std::to_string(i), "document " + std::to_string(i));
  }
  PrepareOptions options;
  options.val_fraction = 0.25;
  const PrepareResult first = prepare({scratch.path("in")}, scratch.path("first"), options);
  EXPECT_EQ(first.documents(), 200);
  // Binomial(200, 1/4): 50 +- 6 (one sigma); five sigmas. The names are fixed, so this passes
  // always or never.
  EXPECT_NEAR(static_cast<double>(first.val_documents), 50.0, 30.0);
  const Documents train = documents_of(scratch.path("first/train.bin"));
  const Documents val = documents_of(scratch.path("first/val.bin"));
  EXPECT_EQ(static_cast<int64_t>(train.size()), first.train_documents);
  EXPECT_EQ(static_cast<int64_t>(val.size()), first.val_documents);

  // Under another root and with one document more: the same split, in the same order.
  fs::rename(scratch.path("in"), scratch.path("moved"));
  scratch.write("moved/zzz", "added");
  prepare({scratch.path("moved")}, scratch.path("second"), options);
  Documents all_train = documents_of(scratch.path("second/train.bin"));
  Documents all_val = documents_of(scratch.path("second/val.bin"));
  Documents& with_added = !all_train.empty() && all_train.back() == "added" ? all_train : all_val;
  ASSERT_EQ(with_added.back(), "added");
  with_added.pop_back();
  EXPECT_EQ(all_train, train);
  EXPECT_EQ(all_val, val);
}

TEST(Prepare, WritesMeta) {
  const Scratch scratch;
  scratch.write("in/a", "12");
  scratch.write("in/b", "345");
  prepare({scratch.path("in")}, scratch.path("out"));
  const nlohmann::json meta = nlohmann::json::parse(scratch.read("out/meta.json"));
  EXPECT_EQ(meta, (nlohmann::json{{"format_version", 1},
                                  {"tokenizer", "bytes"},
                                  {"vocab_size", 257},
                                  {"separator", 256},
                                  {"documents", 2},
                                  {"train_documents", 2},
                                  {"val_documents", 0},
                                  {"train_tokens", 7},
                                  {"val_tokens", 0},
                                  {"source_paths", 1}}));
}

TEST(Prepare, RunsAgainIntoAFolderInsideItsSource) {
  const Scratch scratch;
  scratch.write("in/a", "1");
  prepare({scratch.path("in")}, scratch.path("in/out"));
  const std::string first = scratch.read("in/out/train.bin");
  const PrepareResult again = prepare({scratch.path("in")}, scratch.path("in/out"));
  EXPECT_EQ(scratch.read("in/out/train.bin"), first);
  EXPECT_EQ(again.binary_files, 0);
}

TEST(Prepare, RemovesAFormerSplit) {
  const Scratch scratch;
  for (int i = 0; i < 50; ++i) scratch.write("in/" + std::to_string(i), "x");
  PrepareOptions options;
  options.val_fraction = 0.5;
  prepare({scratch.path("in")}, scratch.path("out"), options);
  ASSERT_TRUE(fs::exists(scratch.path("out/val.bin")));
  prepare({scratch.path("in")}, scratch.path("out"));
  EXPECT_FALSE(fs::exists(scratch.path("out/val.bin")));
}

TEST(Prepare, RefusesWhatCannotWorkAndKeepsTheFormerFiles) {
  const Scratch scratch;
  const std::string out = scratch.path("out");
  const std::string text = scratch.write("a.txt", "1");
  prepare({text}, out);
  const auto error = [&](const std::vector<std::string>& paths, double val_fraction = 0.0) {
    PrepareOptions options;
    options.val_fraction = val_fraction;
    return config_error([&] { prepare(paths, out, options); });
  };
  EXPECT_THAT(error({}), HasSubstr("at least one"));
  EXPECT_THAT(error({scratch.path("none")}), AllOf(HasSubstr("none"), HasSubstr("No such file")));
  const std::string binary = scratch.write("b.bin", std::string(9, '\0'));
  EXPECT_THAT(error({binary}), AllOf(HasSubstr("no text found"), HasSubstr("1 binary")));
  EXPECT_THAT(error({text}, 1.0), HasSubstr("[0, 1)"));
  EXPECT_THAT(error({text}, -0.1), HasSubstr("[0, 1)"));
  EXPECT_THAT(error({text}, 1e-9), HasSubstr("none of 1"));
  EXPECT_THAT(error({text}, 1.0 - 1e-9), HasSubstr("none to train on"));
  fs::create_symlink(scratch.path("nowhere"), scratch.path("dangling"));
  EXPECT_THAT(error({scratch.folder()}), HasSubstr("dangling"));
  EXPECT_EQ(documents_of(scratch.path("out/train.bin")), (Documents{"1"}));
  EXPECT_EQ(std::distance(fs::directory_iterator(out), fs::directory_iterator()), 2);
}

TEST(Prepare, ADiskThatIsFullLeavesTheFormerSetWhole) {
  const Scratch scratch;
  prepare({scratch.write("small.txt", "former")}, scratch.path("out"));
  const std::string large = scratch.write("large.txt", std::string(3000, 'x'));
  {
    const FileSizeLimit limit(4096);
    EXPECT_THROW(prepare({large}, scratch.path("out")), ConfigError);
  }
  EXPECT_TRUE(fs::exists(scratch.path("out/meta.json")));
  EXPECT_EQ(documents_of(scratch.path("out/train.bin")), Documents{"former"});
}

TEST(Prepare, RefusesAnOutputThatIsNoFolder) {
  const Scratch scratch;
  const std::string text = scratch.write("a.txt", "1");
  EXPECT_THAT(config_error([&] { prepare({text}, text); }), HasSubstr("a.txt"));
  EXPECT_THAT(config_error([&] { prepare({text}, text + "/out"); }), HasSubstr("output folder"));
  EXPECT_THAT(config_error([&] { prepare({text}, "/proc/no/such"); }), HasSubstr("output folder"));
}

}  // namespace
}  // namespace tessera::data
