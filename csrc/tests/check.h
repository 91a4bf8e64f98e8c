// A minimal test harness: TEST registers a function, CHECK counts a failure and continues, ranks are threads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace moe_comm::test {

struct Test {
  const char* name;
  void (*body)();
};

std::vector<Test>& tests();
void fail(const char* file, int line, const std::string& what);
int failures();
// Number of repetitions of random tests: 1 by default (for sanitizers); the command line can raise it.
int repeats();

struct Register {
  Register(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

#define TEST(name)                                                       \
  static void name();                                                    \
  static const ::moe_comm::test::Register register_##name(#name, &name); \
  static void name()

#define CHECK(condition)                                                               \
  do {                                                                                 \
    if (!(condition)) ::moe_comm::test::fail(__FILE__, __LINE__, "CHECK " #condition); \
  } while (0)

#define CHECK_EQ(a, b)                                                                                               \
  do {                                                                                                               \
    const auto check_a = (a);                                                                                        \
    const auto check_b = (b);                                                                                        \
    if (!(check_a == check_b)) {                                                                                     \
      ::moe_comm::test::fail(__FILE__, __LINE__,                                                                     \
                             "CHECK " #a " == " #b ": " + std::to_string(check_a) + ", " + std::to_string(check_b)); \
    }                                                                                                                \
  } while (0)

#define CHECK_THROWS(expression, Error)                                                               \
  do {                                                                                                \
    bool check_thrown = false;                                                                        \
    try {                                                                                             \
      expression;                                                                                     \
    } catch (const Error&) {                                                                          \
      check_thrown = true;                                                                            \
    }                                                                                                 \
    if (!check_thrown) ::moe_comm::test::fail(__FILE__, __LINE__, #expression " must throw " #Error); \
  } while (0)

inline size_t at_index(int64_t i) { return static_cast<size_t>(i); }

template <class T>
int64_t address(const std::vector<T>& words) {
  return reinterpret_cast<int64_t>(words.data());
}

// A small, fast generator with the same sequence on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t next();
  int64_t below(int64_t n) { return n <= 0 ? 0 : static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(double p) { return unit() < p; }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

// Run body(rank) on `world` threads. An exception that escapes from body is a failure.
void on_ranks(int world, const std::function<void(int)>& body);

}  // namespace moe_comm::test
