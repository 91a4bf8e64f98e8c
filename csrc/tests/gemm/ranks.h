// Products that wait for rows of other ranks, and whose results other ranks wait for (cuda/gemm/listed.h), on threads
// of one process. Each rank has three threads:
//
//   sends rows, tile by tile, with flags   runs arrived, then published   waits for each slice of all ranks' results
//
// The last rank sends its rows only when every other rank has taken all tiles of its list: so none waits for it while
// there are rows of others.
#pragma once

#include <cmath>
#include <deque>

#include "tests/gemm/numbers.h"

namespace moe_comm {
namespace gemm {

constexpr int64_t kTurn = 7;
// Of a rank. The last tile of an expert also loads rows of the next one, whatever they are, and computes nothing of
// them that is stored. ThreadSanitizer would find these loads.
constexpr int64_t kExperts = kOrdersAreChecked ? 1 : 2;

struct Rank {
  Rank(int world, int64_t rows, int64_t inner, int64_t columns, int64_t hidden, std::mt19937* random)
      : received(1, rows, inner, nullptr),
        h(1, rows, columns, nullptr),
        out(1, rows, hidden, nullptr),
        w1(kExperts, columns, inner, random),
        w2(kExperts, columns, hidden, random),  // transposed
        b1(1, kExperts, columns, random),
        b2(1, kExperts, hidden, random),
        words(static_cast<size_t>(kExperts * world * p2p::kTileFlags + p2p::kMaxSlices * world)),
        taken(2),
        written(static_cast<size_t>(p2p::kMaxSlices * world + 1)) {}
  int64_t result_flags() const { return static_cast<int64_t>(words.size()) - p2p::kMaxSlices * world(); }
  int64_t world() const { return (static_cast<int64_t>(written.size()) - 1) / p2p::kMaxSlices; }

  Numbers received, h, out, w1, w2, b1, b2;
  std::vector<int64_t> words, taken, written;  // flags; see ListArgs
  std::vector<int64_t> items, rows_EW, tiles_W, aside;
  int64_t count = 0, state[2] = {kTurn, 0}, abort = 0;
  p2p::Report report{};
};

// The tiles in the order of overlap/triton/tile_list.py.
inline void list_tiles(Rank& rank, int64_t own, int64_t world, int64_t tiles_n) {
  rank.tiles_W.assign(static_cast<size_t>(world), 0);
  int64_t before = 0;
  for (int64_t e = 0; e < kExperts; ++e) {
    const int64_t* const rows = &rank.rows_EW[static_cast<size_t>(e * world)];
    int64_t total = 0, to_own = 0;
    for (int64_t w = 0; w < world; ++w) {
      total += rows[w];
      to_own += w <= own ? rows[w] : 0;
    }
    const int64_t tiles = (total + kTileRows - 1) / kTileRows, first = (to_own + kTileRows - 1) / kTileRows;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t start = (first + i) % tiles * kTileRows, end = std::min<int64_t>(start + kTileRows, total);
      int64_t begin = 0, from = -1, to = -1, begin_of_first = 0;
      for (int64_t w = 0; w < world; begin += rows[w++]) {
        if (rows[w] == 0 || begin >= end || begin + rows[w] <= start) continue;
        if (from < 0) begin_of_first = begin;
        from = from < 0 ? w : from;
        to = w;
        ++rank.tiles_W[static_cast<size_t>(w)];
      }
      for (const int64_t word : {e, before + start, before + end, from, to, before + begin_of_first}) {
        rank.items.push_back(word);
      }
      ++rank.count;
    }
    before += total;
  }
  rank.aside.resize(static_cast<size_t>(rank.count * tiles_n) + 1);
}

inline void test_ranks(int world, unsigned seed) {
  std::mt19937 random(seed);
  const bool small = world > 3, biased = world != 2;
  const int64_t inner = 72, columns = small ? 64 : 264, hidden = small ? 64 : 520, tiles_n = (columns + 255) / 256;
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  // rows[s][r][e]: of rank s for expert e of rank r. Some send none; some several tiles.
  std::vector<std::vector<std::array<int64_t, 2>>> rows(size(world), {size(world), {0, 0}});
  for (auto& of_source : rows) {
    for (auto& of_rank : of_source) {
      for (int64_t e = 0; e < kExperts; ++e)
        of_rank[size(e)] = random() % 4 == 0 ? 0 : static_cast<int64_t>(random() % (small ? 20 : 150));
    }
  }
  std::deque<Rank> ranks;
  std::vector<int64_t> peers;
  for (int r = 0; r < world; ++r) {
    int64_t total = 0;
    for (int s = 0; s < world; ++s) total += rows[size(s)][size(r)][0] + rows[size(s)][size(r)][1];
    ranks.emplace_back(world, std::max<int64_t>(total, 1), inner, columns, hidden, &random);
    Rank& rank = ranks.back();
    for (int64_t e = 0; e < kExperts; ++e) {
      for (int s = 0; s < world; ++s) rank.rows_EW.push_back(rows[size(s)][size(r)][size(e)]);
    }
    list_tiles(rank, r, world, tiles_n);
    peers.push_back(reinterpret_cast<int64_t>(rank.words.data()));
  }
  const auto first_row = [&](int64_t r, int64_t e, int64_t s) {
    int64_t first = 0;
    for (int64_t i = 0; i < e * world + s; ++i) first += ranks[size(r)].rows_EW[size(i)];
    return first;
  };
  const auto value = [](int64_t s, int64_t r, int64_t e, int64_t i, int64_t k) {
    return static_cast<double>((s * 3 + r * 5 + e * 7 + i * 11 + k * 13) % 9 - 4);
  };
  const auto send = [&](int64_t s) {
    const int64_t late = world - 1;
    for (int64_t r = 0; s == late && r < late; ++r) {
      while (load_system(ranks[size(r)].taken.data()) < ranks[size(r)].count * tiles_n) std::this_thread::yield();
    }
    for (int64_t e = 0; e < kExperts; ++e) {
      for (int64_t step = 1; step <= world; ++step) {
        const int64_t r = (s + world - step) % world, n = rows[size(s)][size(r)][size(e)], first = first_row(r, e, s);
        Rank& to = ranks[size(r)];
        for (int64_t t = 0; t < p2p::num_flags(n); ++t) {
          const int64_t of_tile = p2p::flag_rows(n);
          for (int64_t i = t * of_tile; i < std::min(n, (t + 1) * of_tile); ++i) {
            for (int64_t k = 0; k < inner; ++k) {
              to.received.at(0, first + i, k) = Numbers::to_bits(value(s, r, e, i, k));
            }
          }
          store_system(&to.words[size((e * world + s) * p2p::kTileFlags + t)], kTurn);
        }
      }
    }
  };
  const auto multiply = [&](int64_t r) {
    Rank& rank = ranks[size(r)];
    const int64_t blocks = 2;
    const Launcher launcher(std::make_shared<ModelStarter>(seed + static_cast<unsigned>(r), r * blocks),
                            reinterpret_cast<uintptr_t>(&encode_map), blocks);
    const auto at = [](const auto* p) { return reinterpret_cast<int64_t>(p); };
    ListedProduct p;
    p.blocks = blocks;
    p.rows.experts = kExperts;
    p.rows.rows = rank.received.matrices();
    p.rows.w = rank.w1.matrices();
    p.rows.out = rank.h.matrices();
    if (biased) {
      p.rows.bias_at = rank.b1.matrices().at;
      p.rows.bias_stride = rank.b1.stride;
    }
    p.list = {at(rank.items.data()),
              at(&rank.count),
              at(rank.rows_EW.data()),
              at(rank.tiles_W.data()),
              at(rank.taken.data()),
              at(rank.aside.data()),
              at(peers.data()),
              at(rank.state),
              at(&rank.report),
              at(&rank.abort),
              r,
              world,
              0,
              kTurn,
              int64_t{100} << 30};
    launcher.listed(p, 0);
    p.published = p.rows.transposed = true;
    p.rows.rows = rank.h.matrices();
    p.rows.w = rank.w2.matrices();
    p.rows.out = rank.out.matrices();
    if (biased) {
      p.rows.bias_at = rank.b2.matrices().at;
      p.rows.bias_stride = rank.b2.stride;
    }
    p.list[4] = at(rank.written.data());
    p.list[12] = rank.result_flags();
    launcher.listed(p, 0);
  };
  // The rows of rank s at all ranks, slice by slice.
  const std::string name = "ranks, " + std::to_string(world);
  std::mutex counting;
  const auto sum = [&](int64_t s) {
    for (int64_t slice = 0; slice < p2p::num_slices(hidden); ++slice) {
      for (int64_t r = 0; r < world; ++r) {
        Rank& rank = ranks[size(r)];
        const int64_t* const flag = &ranks[size(s)].words[size(ranks[size(s)].result_flags() + slice * world + r)];
        while (load_system(flag) < kTurn) std::this_thread::yield();
        for (int64_t e = 0; e < kExperts; ++e) {
          for (int64_t i = 0; i < rows[size(s)][size(r)][size(e)]; ++i) {
            std::vector<double> h;
            const int64_t row = first_row(r, e, s) + i;
            for (int64_t n = 0; n < columns; ++n) {
              double total = biased ? rank.b1.number(0, e, n) : 0;
              for (int64_t k = 0; k < inner; ++k) total += value(s, r, e, i, k) * rank.w1.number(e, n, k);
              h.push_back(float_of(Numbers::to_bits(total), 0));
            }
            bool same = true;
            for (int64_t n = p2p::first_column(hidden, slice); n < p2p::first_column(hidden, slice + 1); ++n) {
              double total = biased ? rank.b2.number(0, e, n) : 0;
              for (int64_t k = 0; k < columns; ++k) total += h[size(k)] * rank.w2.number(e, k, n);
              same = same && std::abs(rank.out.number(0, row, n) - total) <= std::abs(total) * 0.004;
            }
            const std::lock_guard<std::mutex> lock(counting);
            expect(same, name);
          }
        }
      }
    }
  };
  std::vector<std::thread> running;
  for (int64_t r = 0; r < world; ++r) {
    running.emplace_back(send, r);
    running.emplace_back(multiply, r);
    running.emplace_back(sum, r);
  }
  for (auto& thread : running) thread.join();
  for (const Rank& rank : ranks) expect(rank.state[1] == 0, name + ", a fault");
}

// A linear layer over the rows of all ranks, which have different numbers of rows: x @ w1.T of each rank, then their
// products with its w2, stored at the rank of the rows.
struct LinearRank {
  LinearRank(int64_t rows, int64_t all_rows, int64_t inner, int64_t columns, int64_t hidden, std::mt19937* random)
      : own(1, rows, inner, random),
        received(1, all_rows, inner, nullptr),  // NaN in place of the own rows
        h(1, all_rows, columns, nullptr),
        w1(1, columns, inner, random),
        w2(1, columns, hidden, random) {}  // transposed

  Numbers own, received, h, w1, w2;
  std::vector<int64_t> block;                            // flags of rows and of results, and the results of each rank
  std::vector<int64_t> items[2], taken, written, aside;  // items: from the own rows on; from those of the next rank on
  int64_t own_row = 0, count = 0, words[9] = {kTurn};    // State and Report begin at the same word
};

struct Linear {
  Linear(int world, const std::vector<int64_t>& rows, int64_t inner, int64_t columns, int64_t hidden,
         std::mt19937* random)
      : world(world), rows(rows), inner(inner), columns(columns), hidden(hidden) {
    const int64_t most = *std::max_element(rows.begin(), rows.end());
    for (const int64_t n : rows) all_rows += n;
    row_flags = (most + 127) / 128;
    result_flags = row_flags * ((hidden + 127) / 128);
    results = (world * (row_flags + result_flags) + 1) / 2 * 2;
    slot = most * hidden;
    for (int r = 0; r < world; ++r) {
      ranks.emplace_back(rows[at(r)], all_rows, inner, columns, hidden, random);
      LinearRank& rank = ranks.back();
      rank.own_row = first_row(r);
      rank.block.resize(at(results + world * slot / 4));
      rank.taken.resize(1);
      rank.written.resize(at(world * result_flags + 1));
      peers.push_back(reinterpret_cast<int64_t>(rank.block.data()));
    }
  }
  static size_t at(int64_t n) { return static_cast<size_t>(n); }
  int64_t first_row(int64_t rank) const {
    int64_t first = 0;
    for (int64_t r = 0; r < rank; ++r) first += rows[at(r)];
    return first;
  }
  int64_t tiles_n() const { return (columns + kTileColumns - 1) / kTileColumns; }
  void list(int64_t r) {
    LinearRank& rank = ranks[at(r)];
    for (int64_t step = 0; step <= world; ++step) {
      const int64_t of = (r + step) % world, begin = first_row(of), end = begin + rows[at(of)];
      for (int64_t row = begin; row < end; row += kTileRows) {
        for (const int64_t word : {int64_t{0}, row, std::min<int64_t>(row + kTileRows, end), of, of, begin}) {
          if (step < world) rank.items[0].push_back(word);
          if (step > 0) rank.items[1].push_back(word);
        }
      }
    }
    rank.count = static_cast<int64_t>(rank.items[0].size()) / kItemWords;
    rank.aside.resize(at(rank.count * tiles_n()) + 1);
  }
  // Rank s sends its rows to the others.
  void send(int64_t s) {
    LinearRank& from = ranks[at(s)];
    for (int64_t step = 1; step < world; ++step) {
      const int64_t r = (s + world - step) % world;
      for (int64_t row = 0; row < rows[at(s)]; ++row) {
        for (int64_t k = 0; k < inner; ++k) {
          ranks[at(r)].received.at(0, from.own_row + row, k) = from.own.at(0, row, k);
        }
        const bool last = row % 128 == 127 || row + 1 == rows[at(s)];
        if (last) store_system(&ranks[at(r)].block[at(s * row_flags + row / 128)], kTurn);
      }
    }
  }
  ListedProduct product(int64_t r, bool published, int64_t timeout_ns = int64_t{100} << 30) {
    LinearRank& rank = ranks[at(r)];
    const auto address = [](const auto* p) { return reinterpret_cast<int64_t>(p); };
    ListedProduct p;
    p.blocks = 2;
    p.published = p.rows.transposed = published;
    p.rows.experts = 1;
    p.rows.rows = published ? rank.h.matrices() : rank.received.matrices();
    p.rows.w = published ? rank.w2.matrices() : rank.w1.matrices();
    p.rows.out = rank.h.matrices();
    const int64_t to = 8 * results + 2 * r * slot;
    if (published) p.rows.out = {peers[at(r)] + to, std::max<int64_t>(slot / hidden, 1), hidden, hidden, slot};
    if (!published) p.own = rank.own.matrices();
    p.list = {address(rank.items[published].data()),
              address(&rank.count),
              address(rows.data()),
              0,
              address(published ? rank.written.data() : rank.taken.data()),
              address(rank.aside.data()),
              address(peers.data()),
              address(rank.words),
              address(rank.words),
              address(rank.words + 8),
              r,
              world,
              published ? world * row_flags : 0,
              kTurn,
              timeout_ns,
              published ? result_flags : row_flags,
              rank.own_row,
              to};
    return p;
  }
  double h_of(int64_t r, int64_t s, int64_t i, int64_t n) {
    double total = 0;
    for (int64_t k = 0; k < inner; ++k) total += ranks[at(s)].own.number(0, i, k) * ranks[at(r)].w1.number(0, n, k);
    return float_of(Numbers::to_bits(total), 0);
  }

  const int64_t world;
  const std::vector<int64_t> rows;
  const int64_t inner, columns, hidden;
  int64_t all_rows = 0, row_flags = 0, result_flags = 0, results = 0, slot = 0;  // results: words before the first slot
  std::deque<LinearRank> ranks;
  std::vector<int64_t> peers;
};

// The last rank sends its rows when every other rank has taken all tiles.
inline void test_linear(int world, unsigned seed) {
  std::mt19937 random(seed);
  const bool small = world > 3;
  std::vector<int64_t> rows;
  for (int r = 0; r < world; ++r) {
    // A tile also loads rows of the next rank, whatever they are; ThreadSanitizer would find it.
    const int64_t n = kOrdersAreChecked ? 128 : random() % (small ? 20 : 150);
    rows.push_back(r == 1 ? 0 : r == 0 && !small ? n + (kOrdersAreChecked ? 0 : 128) : n);
  }
  Linear layer(world, rows, 72, small ? 64 : 136, small ? 72 : 264, &random);
  const auto at = Linear::at;
  const std::string name = "linear layer, " + std::to_string(world);
  std::mutex counting;
  const auto send = [&](int64_t s) {
    for (int64_t r = 0; s == world - 1 && r < s; ++r) {
      const LinearRank& rank = layer.ranks[at(r)];
      while (load_system(rank.taken.data()) < rank.count * layer.tiles_n()) std::this_thread::yield();
    }
    layer.send(s);
  };
  const auto multiply = [&](int64_t r) {
    const Launcher launcher(std::make_shared<ModelStarter>(seed + static_cast<unsigned>(r), r * 2),
                            reinterpret_cast<uintptr_t>(&encode_map), 2);
    launcher.listed(layer.product(r, false), 0);
    launcher.listed(layer.product(r, true), 0);
  };
  // The results of all ranks for the rows of rank s, tile by tile.
  const auto sum = [&](int64_t s) {
    const int64_t across = (layer.hidden + 127) / 128;
    const std::vector<int64_t>& block = layer.ranks[at(s)].block;
    for (int64_t r = 0; r < world; ++r) {
      for (int64_t i = 0; i < rows[at(s)]; ++i) {
        std::vector<double> h;
        for (int64_t n = 0; n < layer.columns; ++n) h.push_back(layer.h_of(r, s, i, n));
        const int64_t flag = world * layer.row_flags + r * layer.result_flags + i / 128 * across;
        const auto* const row =
            reinterpret_cast<const uint16_t*>(block.data() + layer.results) + r * layer.slot + i * layer.hidden;
        bool same = true;
        for (int64_t n = 0; n < layer.hidden; ++n) {
          if (n % 128 == 0) {
            while (load_system(&block[at(flag + n / 128)]) < kTurn) std::this_thread::yield();
          }
          double total = 0;
          for (int64_t k = 0; k < layer.columns; ++k) total += h[at(k)] * layer.ranks[at(r)].w2.number(0, k, n);
          same = same && std::abs(float_of(row[n], 0) - total) <= std::abs(total) * 0.004;
        }
        const std::lock_guard<std::mutex> lock(counting);
        expect(same, name);
      }
    }
  };
  for (int64_t r = 0; r < world; ++r) layer.list(r);
  std::vector<std::thread> running;
  for (int64_t r = 0; r < world; ++r) {
    running.emplace_back(send, r);
    running.emplace_back(multiply, r);
    running.emplace_back(sum, r);
  }
  for (auto& thread : running) thread.join();
  for (const LinearRank& rank : layer.ranks) expect(rank.words[1] == 0, name + ", a fault");
}

// A rank that does not send: its rows become NaN, and the first of its flags is reported.
inline void test_late_rank(unsigned seed) {
  std::mt19937 random(seed);
  Linear layer(2, {5, 130}, 72, 264, 72, &random);
  layer.list(0);
  for (int64_t i = 5; i < layer.all_rows; ++i) {
    for (int64_t k = 0; k < layer.inner; ++k) layer.ranks[0].received.at(0, i, k) = 0;
  }
  Launcher(std::make_shared<ModelStarter>(seed), reinterpret_cast<uintptr_t>(&encode_map), 2)
      .listed(layer.product(0, false, 1000000), 0);
  LinearRank& rank = layer.ranks[0];
  for (int64_t i = 0; i < layer.all_rows; ++i) {
    for (int64_t n = 0; n < layer.columns; ++n) {
      const double value = rank.h.number(0, i, n);
      expect(i < 5 ? value == layer.h_of(0, 0, i, n) : rank.h.at(0, i, n) != 0x7fc1 && std::isnan(value), "late rank");
    }
  }
  const auto& report = *reinterpret_cast<const p2p::Report*>(rank.words);
  const int64_t flag = report.what - layer.row_flags;  // after those of rank 0
  expect(report.fault == p2p::kTimedOut && report.who == 1 && flag >= 0 && flag < 2, "late rank, report");
  expect(report.expected == kTurn && report.value == 0, "late rank, values");
}

}  // namespace gemm
}  // namespace moe_comm
