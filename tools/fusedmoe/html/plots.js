// The plots of the page: a roofline and, for each model, time over tokens. Scales, axes and paths
// are d3's (3.5, Debian's libjs-d3). Text and tables are in page.js, which calls draw().
'use strict';

const kPalette = ['--c0', '--c1', '--c2', '--c3', '--c4', '--c5', '--c6'].map(c => `var(${c})`);
// Of peers in the roofline, where colours tell models apart; with the sign that the legend shows.
const kSymbols = [['square', '\u25a1'], ['diamond', '\u25c7'], ['triangle-up', '\u25b3'],
                  ['triangle-down', '\u25bd'], ['cross', '\u271a']];
const symbolOf = index => kSymbols[index % kSymbols.length];
const colorOf = index => kPalette[index % kPalette.length];

// 1234.5 -> "1234", 12.345 -> "12.3", 0.01234 -> "0.012"
function short(value) {
  if (value >= 100) return String(Math.round(value));
  if (value >= 10) return value.toFixed(1);
  return value >= 1 ? value.toFixed(2) : String(Number(value.toPrecision(2)));
}

function duration(us) {
  return us >= 1e6 ? `${short(us / 1e6)} s` : us >= 1e3 ? `${short(us / 1e3)} ms` : `${short(us)} us`;
}

// Of a tick: 1, 2 or 5 times a power of ten.
function roundDuration(us) {
  return us >= 1e6 ? `${us / 1e6} s` : us >= 1e3 ? `${us / 1e3} ms` : `${us} us`;
}

// A tick for each 1, 2, 5 of a few decades, for each decade of many.
function ticksOf(scale) {
  const [low, high] = scale.domain();
  const mantissas = Math.log10(high / low) > 3.2 ? [1] : [1, 2, 5];
  const ticks = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); ++e) {
    for (const m of mantissas) {
      const tick = Number(`${m}e${e}`);
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  }
  return ticks;
}

function tipOn(selection, text) {
  const tip = d3.select('#tip');
  selection.classed('mark', true)
      .on('mouseover', function(d) {
        const box = this.getBoundingClientRect();
        const left = Math.min(window.scrollX + box.left + 14,
                              window.scrollX + document.documentElement.clientWidth - 310);
        tip.text(text(d))
            .style({left: `${Math.max(left, 4)}px`, top: `${window.scrollY + box.bottom + 8}px`,
                    opacity: 1});
      })
      .on('mouseout', () => tip.style('opacity', 0));
}

// Log-log axes in a new svg of the box's width. size: {height, x: [low, high], y, xLabel, yLabel,
// xTicks (else chosen), yFormat}.
function frame(box, size) {
  const width = Math.max(box.clientWidth, 260);
  const margin = {left: 58, right: 16, top: 26, bottom: 44};
  const x = d3.scale.log().domain(size.x).range([margin.left, width - margin.right]);
  const y = d3.scale.log().domain(size.y).range([size.height - margin.bottom, margin.top]);
  const svg = d3.select(box).append('svg').attr({width, height: size.height,
                                                 viewBox: `0 0 ${width} ${size.height}`});
  const axis = (scale, orient, ticks, format, length, at) => {
    svg.append('g').attr('class', 'axis').attr('transform', at)
        .call(d3.svg.axis().scale(scale).orient(orient).tickValues(ticks).tickFormat(format)
                  .innerTickSize(-length).outerTickSize(0).tickPadding(9));
  };
  axis(x, 'bottom', size.xTicks || ticksOf(x), size.xFormat || String,
       size.height - margin.top - margin.bottom, `translate(0,${size.height - margin.bottom})`);
  axis(y, 'left', ticksOf(y), size.yFormat || String, width - margin.left - margin.right,
       `translate(${margin.left},0)`);
  const label = (text, at, anchor) => svg.append('text').text(text)
      .attr({'class': 'axis-label', x: at[0], y: at[1], 'text-anchor': anchor});
  label(size.xLabel, [width - margin.right, size.height - 6], 'end');
  label(size.yLabel, [4, 12], 'start');
  // Marks that may leave the axes go into `inside`.
  const clip = `clip${document.querySelectorAll('clipPath').length}`;
  svg.append('clipPath').attr('id', clip).append('rect').attr({
    x: margin.left, y: margin.top, width: width - margin.left - margin.right,
    height: size.height - margin.top - margin.bottom});
  const inside = svg.append('g').attr('clip-path', `url(#${clip})`);
  return {svg, inside, x, y, width, right: width - margin.right, taken: []};
}

// Puts a text beside a point where it hides neither a point nor another text; leaves it out where
// there is no such place: the point's tip says it as well.
function place(plot, text, px, py, color) {
  const width = 6.9 * text.length, height = 14;
  const spots = [[0, -11], [9 + width / 2, 4], [0, 21], [-9 - width / 2, 4], [width / 2, -13],
                 [-width / 2, -13], [width / 2, 23], [-width / 2, 23]];
  for (const [dx, dy] of spots) {
    const box = [px + dx - width / 2, py + dy - 11, px + dx + width / 2, py + dy + height - 11];
    if (box[0] < 56 || box[2] > plot.width || box[1] < 12) continue;
    if (plot.taken.some(t => box[0] < t[2] && t[0] < box[2] && box[1] < t[3] && t[1] < box[3])) {
      continue;
    }
    plot.taken.push(box);
    plot.svg.append('text').text(text).style('fill', color)
        .attr({'class': 'halo', x: px + dx, y: py + dy, 'text-anchor': 'middle'});
    return;
  }
}

function legend(box, entries) {
  const spans = d3.select(box).append('div').attr('class', 'legend').selectAll('span')
      .data(entries).enter().append('span');
  spans.append('i').attr('class', e => e.kind).style('border-color', e => e.color || null)
      .text(e => e.sign || '');
  spans.append('span').text(e => e.text);
}

// Roofs that are the same but for noise become one line. roofs: highest first.
function merged(roofs) {
  const result = [];
  for (const roof of roofs) {
    const last = result[result.length - 1];
    if (!last || last.high > 1.03 * roof.high) {
      result.push({...roof});
    } else {
      const [mnemonic, registers] = roof.name.split(' ');
      const added = last.name.startsWith(`${mnemonic} `) && registers ? registers : roof.name;
      Object.assign(last, {name: `${last.name}, ${added}`, low: Math.min(last.low, roof.low),
                           used: last.used || roof.used});
    }
  }
  return result;
}

// cells: one row of bench for each model and number of tokens; see page.js.
function drawRoofline(box, cells, models, peers) {
  const points = [];
  for (const row of cells) {
    const point = {row, x: row.operations / row.bytes_moved, color: colorOf(models.indexOf(row.model))};
    points.push({...point, who: 'fusedmoe', us: row.time_us.median});
    for (const peer of timed(row)) points.push({...point, who: peer.name, us: peer.time_us.median});
  }
  for (const point of points) point.y = point.row.operations / point.us / 1e3;
  const bandwidths = cells.flatMap(r => Object.values(r.bandwidth_probes_gbs));
  const names = [...new Set(cells.flatMap(r => r.peak_probes_gflops.map(p => p.instruction)))];
  const roofs = names.map(name => {
    const values = cells.flatMap(r => r.peak_probes_gflops.filter(p => p.instruction === name))
                       .flatMap(p => [p.before, p.after]);
    return {name, low: d3.min(values), high: d3.max(values),
            used: cells.some(r => r.peak_instruction === name)};
  }).sort((a, b) => b.high - a.high);
  const bandwidth = d3.max(bandwidths);
  const top = d3.max(roofs, r => r.high);
  const ridge = top / bandwidth;
  const size = {
    height: Math.max(340, Math.min(500, box.clientWidth * 0.6)),
    x: [d3.min(points, p => p.x) / 2, Math.max(d3.max(points, p => p.x) * 2, ridge * 4)],
    y: [d3.min(points, p => p.y) / 2.5, top * 1.8],
    xLabel: 'operations per byte moved', yLabel: 'GFLOP/s',
  };
  legend(box, [{kind: 'dot', color: 'var(--ink)', text: 'fusedmoe'}]
      .concat(peers.map((name, i) => ({kind: 'sign', sign: symbolOf(i)[1], text: name})))
      .concat(models.map((name, i) => ({kind: '', color: colorOf(i), text: name}))));
  const plot = frame(box, size);
  const {svg, inside, x, y} = plot;
  // The memory's roof ends where the best instruction's begins; below, it is clipped by the axes.
  const slope = b => {
    const from = Math.max(size.x[0], size.y[0] / b);
    return [[from, b * from], [top / b, top]];
  };
  const path = d3.svg.line().x(p => x(p[0])).y(p => y(p[1]));
  inside.append('path').attr('d', path(slope(d3.min(bandwidths)).concat(
      slope(bandwidth).reverse())) + 'Z').style({fill: 'var(--floor)', opacity: .16});
  svg.append('path').attr('d', path(slope(bandwidth)))
      .style({fill: 'none', stroke: 'var(--floor)', 'stroke-width': 2});
  let lastLabel = -Infinity;
  for (const roof of merged(roofs)) {
    const left = x(roof.high / bandwidth);
    inside.append('rect').attr({x: left, width: plot.right - left, y: y(roof.high),
                             height: Math.max(y(roof.low) - y(roof.high), 0)})
        .style({fill: 'var(--floor)', opacity: .16});
    svg.append('line').attr({x1: left, x2: plot.right, y1: y(roof.high), y2: y(roof.high)})
        .style({stroke: 'var(--floor)', 'stroke-width': roof.used ? 2 : 1.2,
                'stroke-dasharray': roof.used ? null : '5 4'});
    const at = Math.max(y(roof.high) - 6, lastLabel + 15);
    lastLabel = at;
    svg.append('text').attr({'class': 'halo', x: plot.right, y: at, 'text-anchor': 'end'})
        .style('fill', 'var(--muted)')
        .text(`${roof.name} ${Math.round(roof.high)}${roof.used ? ' (in use)' : ''}`);
  }
  const [start, end] = slope(bandwidth);
  const angle = Math.atan2(y(end[1]) - y(start[1]), x(end[0]) - x(start[0])) * 180 / Math.PI;
  const middle = start[0] * Math.pow(end[0] / start[0], 0.78);  // few points are there
  svg.append('text').text(`memory ${short(bandwidth)} GB/s`)
      .attr({'class': 'halo', 'text-anchor': 'middle',
             transform: `translate(${x(middle)},${y(middle * bandwidth)}) rotate(${angle}) translate(0,-9)`})
      .style('fill', 'var(--muted)');
  for (const point of points) {
    plot.taken.push([x(point.x) - 5, y(point.y) - 5, x(point.x) + 5, y(point.y) + 5]);
  }
  models.forEach((model, i) => {
    const own = points.filter(p => p.row.model === model && p.who === 'fusedmoe');
    svg.append('path').attr('d', path(own.map(p => [p.x, p.y])))
        .style({fill: 'none', stroke: colorOf(i), 'stroke-width': 1.5, opacity: .55});
  });
  const symbol = p => p.who === 'fusedmoe' ? d3.svg.symbol().type('circle').size(95)()
                                           : d3.svg.symbol().type(symbolOf(peers.indexOf(p.who))[0]).size(52)();
  tipOn(svg.selectAll('.point').data(points.slice().reverse()).enter().append('path')
      .attr({d: symbol, transform: p => `translate(${x(p.x)},${y(p.y)})`})
      .style({fill: p => p.who === 'fusedmoe' ? p.color : 'var(--panel)', stroke: p => p.color,
              'stroke-width': 1.8}),
        p => `${p.row.model}, ${tokens(p.row)}\n${p.who}: ${duration(p.us)}, ${short(p.y)} GFLOP/s at ` +
             `${short(p.x)} operations per byte`);
  for (const p of points.filter(p => p.who === 'fusedmoe')) {
    const name = models.length > 1 ? '' : `${tokens(p.row)}`;
    place(plot, name || String(p.row.num_tokens), x(p.x), y(p.y), p.color);
  }
}

function drawTimes(box, cells, models, peers) {
  // All boxes first: how wide each is depends on how many there are.
  const parts = models.map(() => d3.select(box).append('div').node());
  models.forEach((model, m) => {
    const rows = cells.filter(r => r.model === model);
    const part = parts[m];
    d3.select(part).append('h3').text(model);
    const lines = [{name: 'fusedmoe', color: colorOf(0), values: rows.map(r => [r, r.time_us])}];
    peers.forEach((name, i) => {
      const values = rows.flatMap(r => timed(r).filter(p => p.name === name).map(p => [r, p.time_us]));
      if (values.length > 0) lines.push({name, color: colorOf(i + 1), values});
    });
    // One step that something disturbed may be a thousand times slower; it does not set the axis.
    const times = lines.flatMap(l => l.values.flatMap(v => [v[1].min, 1.5 * v[1].median]))
                      .concat(rows.map(r => r.floor_us));
    const counts = rows.map(r => r.num_tokens);
    legend(part, lines.map(l => ({kind: '', color: l.color, text: l.name}))
        .concat([{kind: 'dash', color: 'var(--floor)', text: 'floor'}]));
    const plot = frame(part, {
      height: 300, x: [d3.min(counts) / 1.4, d3.max(counts) * 1.4],
      y: [d3.min(times) / 1.5, d3.max(times) * 1.3], xTicks: [...new Set(counts)],
      xLabel: 'tokens', yLabel: 'time per layer', yFormat: roundDuration,
    });
    const {svg, inside, x, y} = plot;
    const path = d3.svg.line().x(p => x(p[0])).y(p => y(p[1]));
    svg.append('path').attr('d', path(rows.map(r => [r.num_tokens, r.floor_us])))
        .style({fill: 'none', stroke: 'var(--floor)', 'stroke-width': 2, 'stroke-dasharray': '6 4'});
    svg.selectAll('.floor').data(rows).enter().append('circle')
        .attr({cx: r => x(r.num_tokens), cy: r => y(r.floor_us), r: 2.5}).style('fill', 'var(--floor)');
    for (const line of lines.slice().reverse()) {
      svg.append('path').attr('d', path(line.values.map(v => [v[0].num_tokens, v[1].median])))
          .style({fill: 'none', stroke: line.color, 'stroke-width': 2.2});
      inside.selectAll('.none').data(line.values).enter().append('line')
          .attr({x1: v => x(v[0].num_tokens), x2: v => x(v[0].num_tokens),
                 y1: v => y(v[1].min), y2: v => y(v[1].max)})
          .style({stroke: line.color, 'stroke-width': 1.2, opacity: .7});
      tipOn(svg.selectAll('.none').data(line.values).enter().append('circle')
          .attr({cx: v => x(v[0].num_tokens), cy: v => y(v[1].median), r: 4.5})
          .style({fill: line.color, stroke: 'var(--panel)', 'stroke-width': 1.5}),
            v => `${line.name}, ${tokens(v[0])}\nmedian ${duration(v[1].median)}, fastest ` +
                 `${duration(v[1].min)}, slowest ${duration(v[1].max)}\n` +
                 `${(v[1].median / v[0].floor_us).toFixed(2)} x the floor`);
    }
  });
}
