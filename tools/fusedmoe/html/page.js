// Text and tables of the page, from the JSON that the page carries: what ran, where, the warnings,
// the ratio of each cell, and every row. The plots are in plots.js.
'use strict';

const data = JSON.parse(document.getElementById('data').textContent);
// One row for each model and number of tokens: that of the last workspace mode, to which peers
// are compared.
const cells = data.rows.filter(row => row.workspace_mode === 'shared');
const models = [...new Set(cells.map(row => row.model))];
const peers = [...new Set(cells.flatMap(row => (row.peers || []).map(peer => peer.name)))];

function timed(row) { return (row.peers || []).filter(peer => peer.time_us); }
function tokens(row) { return `${row.num_tokens} token${row.num_tokens === 1 ? '' : 's'}`; }

function bytes(count) {
  const units = ['bytes', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  for (; count >= 1024 && unit < 4; ++unit) count /= 1024;
  return `${unit === 0 ? count : short(count)} ${units[unit]}`;
}

// From green at the floor over yellow to red at 3 times the floor, in steps that the eye can tell.
function heat(ratio) {
  const share = Math.min(Math.max(Math.log(ratio) / Math.log(3), 0), 1);
  const dark = matchMedia('(prefers-color-scheme: dark)').matches;
  const hue = 145 - 137 * share;
  return `hsl(${hue}, ${dark ? 42 : 62}%, ${dark ? 22 + 6 * share : 86 - 6 * share}%)`;
}

function drawRatios(box) {
  const counts = [...new Set(cells.map(row => row.num_tokens))].sort((a, b) => a - b);
  const table = d3.select(box).append('table').attr('class', 'heat');
  const head = table.append('thead').append('tr');
  head.append('th');
  counts.forEach(count => head.append('th').text(tokens({num_tokens: count})));
  const body = table.append('tbody');
  for (const model of models) {
    const line = body.append('tr');
    line.append('th').text(model);
    for (const count of counts) {
      const row = cells.find(r => r.model === model && r.num_tokens === count);
      const cell = line.append('td');
      if (!row) continue;
      // Nothing is faster than the floor, unless caches kept the weights or a probe was disturbed.
      const doubtful = row.ratio < 0.9;
      cell.classed('doubtful', doubtful).style('background', doubtful ? null : heat(row.ratio));
      cell.append('b').text(row.ratio.toFixed(2));
      if (doubtful) cell.append('small').text('see the warnings');
      cell.append('small').text(duration(row.time_us.median));
      for (const peer of row.peers || []) {
        cell.append('small').text(peer.time_us
            ? `${peer.name} ${peer.ratio.toFixed(2)} (${peer.speedup.toFixed(2)} x ours)`
            : `${peer.name}: -`).attr('title', peer.reason || null);
      }
    }
  }
}

function drawFacts(box) {
  const first = cells[0];
  const facts = [['CPU', data.machine.cpu]];
  const add = (name, value) => facts.push([name, value]);
  add('caches', data.machine.caches.map(c => `L${c.level} ${c.type} ${bytes(c.bytes)}` +
      (c.shared_by > 1 ? ` (of ${c.shared_by} CPUs)` : '')).join(', '));
  add('instruction set', `${first.isa}; the machine has ` +
      data.machine.instruction_sets.filter(i => i.available).map(i => i.name).join(', '));
  add('threads', String(first.threads));
  const range = values => {
    const low = Math.min(...values), high = Math.max(...values);
    return `${short(low)} to ${short(high)}`;
  };
  add('memory, read', `${range(cells.flatMap(r => Object.values(r.bandwidth_probes_gbs)))} GB/s`);
  for (const name of new Set(cells.flatMap(r => r.peak_probes_gflops.map(p => p.instruction)))) {
    const found = cells.flatMap(r => r.peak_probes_gflops.filter(p => p.instruction === name));
    add(name, `${range(found.flatMap(p => [p.before, p.after]))} GFLOP/s` +
        (cells.some(r => r.peak_instruction === name) ? ', in use' : ''));
  }
  const others = Math.max(...cells.map(r => r.other_cpu_share));
  add('other programs', `at most ${Math.round(100 * others)} % of the CPUs' time during a row`);
  add('layers of a step', models.map(m => `${m}: ${cells.find(r => r.model === m).layers}`).join(', '));
  for (const peer of data.peers) {
    add(peer.name, peer.version ? `${peer.version}${peer.about ? ': ' + peer.about : ''}`
                                : `not compared: ${peer.reason}`);
  }
  add('fusedmoe', data.machine.version);
  add('date', data.date);
  const list = d3.select(box);
  for (const [name, value] of facts) {
    list.append('dt').text(name);
    list.append('dd').text(value);
  }
}

function drawRows(box) {
  const columns = [
    ['model', r => r.model, 'text'], ['tokens', r => r.num_tokens],
    ['workspace', r => r.workspace_mode, 'text'], ['median us', r => short(r.time_us.median)],
    ['fastest', r => short(r.time_us.min)], ['slowest', r => short(r.time_us.max)],
    ['floor us', r => short(r.floor_us)], ['ratio', r => r.ratio.toFixed(2)],
    ['active experts', r => short(r.active_experts)], ['moved', r => bytes(r.bytes_moved)],
    ['GB/s', r => short(r.bandwidth_gbs)], ['GFLOP/s', r => short(r.peak_gflops)],
    ['allocations', r => r.allocations_per_call], ['scratch', r => bytes(r.scratch_bytes)],
    ['peak scratch', r => bytes(r.peak_scratch_bytes)],
    ['bits', r => r.bit_equal ? 'equal' : 'DIFFER'],
  ].concat(peers.map(name => [`${name} us`, r => {
    const peer = timed(r).find(p => p.name === name);
    return peer ? short(peer.time_us.median) : '';
  }]));
  const table = d3.select(box).append('table').attr('class', 'plain');
  const head = table.append('thead').append('tr');
  columns.forEach(c => head.append('th').attr('class', c[2] || null).text(c[0]));
  const body = table.append('tbody');
  for (const row of data.rows) {
    const line = body.append('tr');
    columns.forEach(c => line.append('td').attr('class', c[2] || null).text(c[1](row)));
  }
}

function draw() {
  document.querySelectorAll('.plot, .facts').forEach(box => { box.textContent = ''; });
  const box = id => document.querySelector(`#${id} .plot`);
  drawRatios(box('ratios'));
  drawRoofline(box('roofline'), cells, models, peers);
  drawTimes(box('times'), cells, models, peers);
  drawFacts(document.querySelector('.facts'));
  drawRows(box('rows'));
}

function main() {
  const first = cells[0];
  document.title = `fusedmoe bench: ${models.join(', ')}`;
  document.getElementById('title').textContent =
      models.length <= 3 ? models.join(', ') : `${models.length} models`;
  document.getElementById('subtitle').textContent =
      `${first.format} weights${first.mode === 'a8' ? ' in mode a8' : ''} on ` +
      `${data.machine.cpu} with ${first.isa || first.device}, ` +
      `${first.threads} thread${first.threads === 1 ? '' : 's'}, ${data.date.slice(0, 10)}`;
  d3.select('#warnings').selectAll('p').data(data.warnings).enter().append('p')
      .attr('class', 'warning').text(text => text);
  document.getElementById('command').textContent = data.command;
  draw();
  let width = document.documentElement.clientWidth;
  window.addEventListener('resize', () => {
    if (document.documentElement.clientWidth !== width) draw();
    width = document.documentElement.clientWidth;
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
}

main();
